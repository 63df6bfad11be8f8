"""Export what a page shows as CSV or JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict

from dapo.store.encoding import to_json
from dapo.view.curves import Curve
from dapo.view.groups import GroupDetail


def curves_csv(curves: Sequence[Curve]) -> str:
    """Return a table with a row per step and a column per curve. A cell without a point is empty."""
    columns = [dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True)) for curve in curves]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", *(curve.name for curve in curves)])
    for step in sorted({step for column in columns for step in column}):
        writer.writerow([step, *(column.get(step, "") for column in columns)])
    return text.getvalue()


def group_json(group: GroupDetail) -> str:
    """Return the group as strict JSON. NaN and infinities become strings, as in the database."""
    return to_json(asdict(group))
