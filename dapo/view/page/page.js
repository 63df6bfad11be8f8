// What the browser does itself, on the page and in the report. Names and texts come from runs: never use them as HTML.
globalThis.dapo = (() => {
  const HELPER = '\u200b', RAW = HELPER + 'raw ', LOW = HELPER + 'low ', WIDTH = HELPER + 'width ';  // as in charts.py

  const save = (api, text, type, ending) => {
    const link = document.createElement('a'), name = api.getOption().title[0].text;
    link.href = URL.createObjectURL(new Blob([text], {type}));
    link.download = name.replace(/[^\p{L}\p{N}@._ -]+/gu, '_') + ending;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };

  const columns = api => {
    const series = new Map(api.getOption().series.map(each => [each.name, each.data])), found = [];
    for (const [name, drawn] of series) {
      if (name.startsWith(HELPER)) continue;
      found.push([name, series.get(RAW + name) || drawn]);
      const low = series.get(LOW + name), width = series.get(WIDTH + name);
      if (!low || !width) continue;
      found.push([name + ' low', low]);
      found.push([name + ' high', low.map(([x, y], i) => [x, y == null ? null : y + width[i][1]])]);
    }
    return found;
  };

  return {
    // List the value of every series at a step, except helper series.
    tooltip: params => {
      const text = value => String(value).replace(/[&<>"']/g, c => '&#' + c.charCodeAt(0) + ';');
      const shown = value => {
        const size = Math.abs(value);
        return size === 0 ? '0' : size >= 1e5 || size < 1e-3 ? value.toExponential(2)
          : Number(value.toPrecision(4)).toLocaleString('en-US', {maximumFractionDigits: 6});
      };
      const rows = params.filter(p => !p.seriesName.startsWith(HELPER) && p.value[1] != null)
        .map(p => '<tr><td>' + p.marker + text(p.seriesName) + '</td><td style="text-align:right;padding-left:12px">'
          + shown(p.value[1]) + '</td></tr>');
      return text(params[0].axisId + ' ' + shown(params[0].value[0])) + '<table>' + rows.join('') + '</table>';
    },

    // Ticks are round numbers: digits beyond those that tell neighbors apart are zeros, which are left out.
    tick: value => {
      const size = Math.abs(value);
      return size === 0 ? '0'
        : size >= 1e6 ? +(value / 1e6).toPrecision(5) + 'M'
        : size >= 1e3 ? +(value / 1e3).toPrecision(5) + 'k'
        : size < 1e-3 ? value.toExponential(1).replace('.0e', 'e')
        : String(+value.toPrecision(6));
    },

    // Save the points drawn, before smoothing, with the bounds of bands.
    saveCsv: (model, api) => {
      const found = columns(api), tables = found.map(([, data]) => new Map(data));
      const steps = [...new Set(tables.flatMap(table => [...table.keys()]))].sort((a, b) => a - b);
      const cell = value => /[",\r\n]/.test(value) ? '"' + value.replaceAll('"', '""') + '"' : value ?? '';
      const rows = [[api.getOption().xAxis[0].name, ...found.map(([name]) => name)]];
      for (const step of steps) rows.push([step, ...tables.map(table => table.get(step))]);
      save(api, rows.map(row => row.map(cell).join(',') + '\n').join(''), 'text/csv', '.csv');
    },

    // A canvas has no vector shapes to save, so draw the chart again, off screen, as SVG.
    saveSvg: (model, api) => import('nicegui-echart').then(({echarts}) => {
      const size = {width: api.getWidth(), height: api.getHeight()};
      const twin = echarts.init(null, null, {renderer: 'svg', ssr: true, ...size});
      twin.setOption({...api.getOption(), toolbox: []});
      save(api, twin.renderToSVGString(), 'image/svg+xml', '.svg');
      twin.dispose();
    }),

    // Show the values of the token under the mouse, or hide them. They are in an attribute, and are set as text.
    showTip: event => {
      const tip = document.getElementById('token-tip'), token = event.target.closest('[data-tip]');
      if (!tip) return;
      tip.style.display = token ? 'block' : 'none';
      if (!token) return;
      tip.textContent = token.dataset.tip;
      const place = token.getClientRects()[0];
      tip.style.left = Math.max(4, Math.min(place.left, innerWidth - tip.offsetWidth - 8)) + 'px';
      tip.style.top = (place.bottom + tip.offsetHeight + 8 > innerHeight
        ? place.top - tip.offsetHeight - 4 : place.bottom + 4) + 'px';
    },

    hideTip: () => {
      const tip = document.getElementById('token-tip');
      if (tip) tip.style.display = 'none';
    },
  };
})();
