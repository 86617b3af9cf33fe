"""`make mutants`: are the tests of the scheduler good enough to find small bugs? Exits 1 if too many live."""

import argparse
import sys

from .catalogue import CatalogueError, Mutant, check_fit, load, renew
from .tree import REPOSITORY, TestRunError
from .verdicts import BaselineError, Verdict, judge

PASS_SCORE = 0.95
PROCESSES = 2


def main() -> int:
    """Prints a line per mutant as verdicts come, then the score."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", metavar="NAME", nargs="+", help="only these mutants")
    parser.add_argument("--list", action="store_true", help="list the mutants, and whether they still fit the code")
    parser.add_argument("--renew", action="store_true", help="write the names and files of today into the list")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="how many to try at a time")
    options = parser.parse_args()
    try:
        if options.renew:
            print(f"{renew(REPOSITORY)} mutants renewed")
            return 0
        mutants = _choose(load(), options.only)
        check_fit(mutants, REPOSITORY)
        if options.list:
            print(
                "\n".join(f"{mutant.name:38} {mutant.file.rpartition('/')[2]:22} {mutant.what}" for mutant in mutants)
            )
            return 0
        return _run(mutants, options.processes)
    except (CatalogueError, BaselineError, TestRunError) as error:
        sys.exit(f"no score: {error}")


def _choose(mutants: list[Mutant], names: list[str] | None) -> list[Mutant]:
    if unknown := set(names or ()) - {mutant.name for mutant in mutants}:
        raise CatalogueError(f"no mutant is called {', '.join(sorted(unknown))}")
    return [mutant for mutant in mutants if names is None or mutant.name in names]


def _run(mutants: list[Mutant], processes: int) -> int:
    verdicts = []
    for verdict in judge(mutants, REPOSITORY, processes=processes):
        print(_line(verdict), flush=True)
        verdicts.append(verdict)
    killed = sum(verdict.killed_by is not None for verdict in verdicts)
    print(f"{killed} of {len(verdicts)} killed: {killed / len(verdicts):.1%}, wanted {PASS_SCORE:.0%}")
    return 0 if killed >= PASS_SCORE * len(verdicts) else 1


def _line(verdict: Verdict) -> str:
    fate = f"killed by {verdict.killed_by.removeprefix('tests/')}" if verdict.killed_by else "SURVIVED"
    return f"{verdict.mutant.name:38} {verdict.seconds:4.0f} s  {fate}  ({verdict.mutant.what})"


if __name__ == "__main__":
    sys.exit(main())
