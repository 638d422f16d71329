"""What a PromQL expression asks for: metrics, labels it picks or groups by, and values. It knows no metric itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import promql_parser as promql

TARGET = frozenset({"namespace", "instance", "job", "pod"})  # labels that Prometheus adds to what it scrapes


@dataclass(frozen=True, slots=True)
class Asked:
    """One selector. `labels` besides Prometheus' own; `values` are those that a label is held against, by label."""

    name: str
    labels: frozenset[str]
    values: dict[str, frozenset[str]] = field(default_factory=dict)


def asked(expression: str) -> list[Asked]:
    """Every selector of an expression, in Grafana's form too. Raises ValueError where it does not parse."""
    return list(_selectors(promql.parse(expression.replace("$__rate_interval", "1m")), frozenset()))


def _selectors(at: Any, grouped: frozenset[str]) -> Iterator[Asked]:
    if isinstance(at, promql.VectorSelector):
        values = {one.name: frozenset(one.value.split("|")) for one in at.matchers.matchers}
        yield Asked(at.name, (grouped | values.keys()) - TARGET, values)
    elif isinstance(at, promql.MatrixSelector):
        yield from _selectors(at.vector_selector, grouped)
    elif isinstance(at, promql.BinaryExpr):
        yield from _selectors(at.lhs, grouped)
        yield from _selectors(at.rhs, grouped)
    elif isinstance(at, promql.AggregateExpr):
        yield from _selectors(at.expr, grouped | frozenset(at.modifier.labels if at.modifier is not None else ()))
    elif isinstance(at, promql.Call):
        for argument in at.args:
            yield from _selectors(argument, grouped)
    elif isinstance(at, promql.ParenExpr | promql.UnaryExpr | promql.SubqueryExpr):
        yield from _selectors(at.expr, grouped)
    else:
        assert isinstance(at, promql.NumberLiteral), f"{type(at).__name__} is not known here"
