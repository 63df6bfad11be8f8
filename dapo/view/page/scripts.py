"""JavaScript functions that a chart needs in the browser. Series names come from runs, so they are escaped."""

from __future__ import annotations

HELPER = "\u200b"  # prefix of series that are drawn but not listed
RAW, LOW, WIDTH = f"{HELPER}raw ", f"{HELPER}low ", f"{HELPER}width "  # followed by the name of the main series

# Lists the value of every series at a step, except helper series.
TOOLTIP = (
    """params => {
  const text = value => String(value).replace(/[&<>"']/g, c => '&#' + c.charCodeAt(0) + ';');
  const shown = value => { const size = Math.abs(value);
    return size === 0 ? '0' : size >= 1e5 || size < 1e-3 ? value.toExponential(2)
      : Number(value.toPrecision(4)).toLocaleString('en-US', {maximumFractionDigits: 6}); };
  const rows = params.filter(p => !p.seriesName.startsWith('"""
    + HELPER
    + """') && p.value[1] != null)
    .map(p => '<tr><td>' + p.marker + text(p.seriesName) + '</td><td style="text-align:right;padding-left:12px">'
      + shown(p.value[1]) + '</td></tr>');
  return 'step ' + text(params[0].value[0]) + '<table>' + rows.join('') + '</table>';
}"""
)

TICK = (
    "value => { const size = Math.abs(value); return size === 0 ? '0'"
    " : size >= 1e6 ? +(value / 1e6).toPrecision(3) + 'M'"
    " : size >= 1e3 ? +(value / 1e3).toPrecision(3) + 'k' : size < 1e-3 ? value.toExponential(1).replace('.0e', 'e')"
    " : String(+value.toPrecision(3)); }"
)

_SAVE = """
  const save = (text, type, ending) => {
    const link = document.createElement('a'), name = api.getOption().title[0].text;
    link.href = URL.createObjectURL(new Blob([text], {type}));
    link.download = name.replace(/[^\\p{L}\\p{N}@._ -]+/gu, '_') + ending;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };"""

# Saves the points drawn, before smoothing, with the bounds of bands.
SAVE_CSV = (
    "(model, api) => {"
    + _SAVE
    + f"""
  const RAW = '{RAW}', LOW = '{LOW}', WIDTH = '{WIDTH}', HELPER = '{HELPER}';"""
    + """
  const series = new Map(api.getOption().series.map(each => [each.name, each.data])), columns = [];
  for (const [name, drawn] of series) {
    if (name.startsWith(HELPER)) continue;
    columns.push([name, series.get(RAW + name) || drawn]);
    const low = series.get(LOW + name), width = series.get(WIDTH + name);
    if (!low || !width) continue;
    columns.push([name + ' low', low]);
    columns.push([name + ' high', low.map(([x, y], i) => [x, y == null ? null : y + width[i][1]])]);
  }
  const tables = columns.map(([, data]) => new Map(data));
  const steps = [...new Set(tables.flatMap(table => [...table.keys()]))].sort((a, b) => a - b);
  const cell = value => /[",\\r\\n]/.test(value) ? '"' + value.replaceAll('"', '""') + '"' : value ?? '';
  const rows = [['step', ...columns.map(([name]) => name)]];
  for (const step of steps) rows.push([step, ...tables.map(table => table.get(step))]);
  save(rows.map(row => row.map(cell).join(',') + '\\n').join(''), 'text/csv', '.csv');
}"""
)

# A canvas has no vector shapes to save, so the chart is drawn again, off screen, as SVG.
SAVE_SVG = (
    "(model, api) => {"
    + _SAVE
    + """
  import('nicegui-echart').then(({echarts}) => {
    const size = {width: api.getWidth(), height: api.getHeight()};
    const twin = echarts.init(null, null, {renderer: 'svg', ssr: true, ...size});
    twin.setOption({...api.getOption(), toolbox: []});
    save(twin.renderToSVGString(), 'image/svg+xml', '.svg');
    twin.dispose();
  });
}"""
)
