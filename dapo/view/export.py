"""What a page shows, as text to take away."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict

from dapo.store.encoding import to_json
from dapo.view.curves import Curve
from dapo.view.groups import GroupDetail


def curves_csv(curves: Sequence[Curve]) -> str:
    """A row per step, a column per curve; empty where a curve has no point in the step."""
    columns = [dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True)) for curve in curves]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", *(curve.name for curve in curves)])
    for step in sorted({step for column in columns for step in column}):
        writer.writerow([step, *(column.get(step, "") for column in columns)])
    return text.getvalue()


def group_json(group: GroupDetail) -> str:
    """NaN and infinities are written as the strings that the database has for them."""
    return to_json(asdict(group))
