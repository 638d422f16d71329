"""Renders the chart for each set of values into golden/, where the tests look at it: python -m ...helm.write_golden"""

from __future__ import annotations

import yaml

from tests.deploy.helm.chart import HERE, render

if __name__ == "__main__":
    for path in sorted((HERE / "values").glob("*.yaml")):
        manifests, _ = render(yaml.safe_load(path.read_text()) or {})
        text = yaml.safe_dump_all(manifests, sort_keys=False, width=120)
        (HERE / "golden" / path.name).write_text(text)
