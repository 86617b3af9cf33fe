"""Writes the alerts of deploy/obs/alerts.yml down as the PrometheusRule beside it; `--check` only says whether it is
current."""

import sys
import textwrap
from typing import Final

from .manifests import ROOT

ALERTS: Final = ROOT / "deploy" / "obs" / "alerts.yml"
RULE: Final = ROOT / "deploy" / "obs" / "prometheus-rule.yaml"
_HEAD: Final = """\
# Written from alerts.yml by `python -m tests.deploy.prometheus_rule`.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: octavo
  labels: {app.kubernetes.io/name: octavo}
spec:
"""


def rule() -> str:
    return _HEAD + textwrap.indent(ALERTS.read_text(encoding="utf-8"), "  ")


def main() -> int:
    if "--check" not in sys.argv[1:]:
        RULE.write_text(rule(), encoding="utf-8")
    elif RULE.read_text(encoding="utf-8") != rule():
        print(f"{RULE.relative_to(ROOT)} is not current; run python -m tests.deploy.prometheus_rule", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
