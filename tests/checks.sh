#!/usr/bin/env bash
# Lints, checks types and generated code: checks.sh BIN. All are looked at, whatever the first ones say.
set -uo pipefail

bin=$1 complaints=()
check() {
    "$bin/$2" "${@:3}" || complaints+=("$1")
}

check lint ruff check --quiet
check format ruff format --quiet --check
check types mypy --no-error-summary
check "generated code" python -m octavo.v1.generate --check
check proto buf lint proto
shopt -s nullglob
for release in proto/released/*.binpb; do
    check "promises of $(basename "$release" .binpb)" buf breaking proto --against "$release"
done
if [ ${#complaints[@]} = 0 ]; then echo "checks: all passed"; exit 0; fi
echo "checks: FAILED: $(IFS=,; echo "${complaints[*]}" | sed 's/,/, /g')"
exit 1
