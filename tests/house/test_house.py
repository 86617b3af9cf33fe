"""Every figure of the house counts what it says, in trees made for it and in this one."""

import json
import re
from pathlib import Path

import pytest

from .__main__ import main
from .docstrings import Docstring, read_docstrings
from .figures import Figure, measure, percentile
from .imports import floors
from .tree import REPOSITORY, ROOTS, Module, read_modules

SCHEDULER = "scheduler/octavo/scheduler"
# The least that can be measured: both classes of the scheduler whose fields count, and the pages that are read.
LEAST = {
    f"{SCHEDULER}/sequence.py": "class Sequence:\n    index: int\n",
    f"{SCHEDULER}/replica.py": "class Replica:\n    hello: int\n",
    "README.md": "# Octavo\n",
    "compose.yaml": "services:\n",
}


def plant(checkout: Path, files: dict[str, str]) -> None:
    for name, text in (LEAST | files).items():
        path = checkout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def loading(name: str) -> str:
    """A line that loads a module of the scheduler."""
    return f"import octavo.scheduler.{name}\n"


def figures(checkout: Path, files: dict[str, str]) -> dict[str, Figure]:
    plant(checkout, files)
    return {figure.name: figure for figure in measure(checkout)}


def module(name: str, source: str = "") -> Module:
    return Module(Path("scheduler", *name.split(".")).with_suffix(".py"), name, source)


def package(**sources: str) -> list[Module]:
    return [module(f"octavo.scheduler.{name}", source) for name, source in sources.items()]


def heights(modules: list[Module]) -> list[list[str]]:
    return [[name.rpartition(".")[2] for name in floor] for floor in floors(modules, "octavo.scheduler")]


def test_files_and_lines_are_counted_without_generated_code(tmp_path: Path) -> None:
    found = figures(
        tmp_path,
        {
            "proto/octavo/v1/one.py": "1\n2\n3\n",
            "proto/octavo/v1/one_pb2.py": "4\n",
            "proto/octavo/v1/one_pb2_grpc.py": "5\n",
            "frontend/octavo/client/twin.py": "# Written by `make twin` from one.py.\n6\n",
            "proto/outside.py": "6\n",
            "worker/octavo/worker/two.py": "7\n",
        },
    )
    assert found["production files"].value == 4
    assert found["production files"].note == "proto 1, kernels 0, frontend 0, scheduler 2, worker 1, evaluation 0"
    assert found["production lines"].value == 8


def test_the_fullest_folder_is_named_and_packages_are_no_loose_files(tmp_path: Path) -> None:
    folder = "worker/octavo/worker/models"
    names = ["__init__", "a", "b", "c"]
    found = figures(tmp_path, {f"{folder}/{name}.py": "" for name in names})["loose files in any folder"]
    assert (found.value, found.note) == (3, folder)


def test_a_chain_of_imports_is_as_long_as_its_modules() -> None:
    modules = package(
        top="from octavo.scheduler.middle import f\nimport octavo.scheduler.bottom\n",
        middle="from octavo.scheduler import bottom\n",
        bottom="import os\n",
        beside="import octavo.scheduler.bottom\n",
    )
    assert heights(modules) == [["top"], ["middle"], ["bottom"]]


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    import octavo.scheduler.low\n",
        "class C:\n    async def f(self):\n        import octavo.scheduler.low\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import octavo.scheduler.low\n",
        "import octavo.worker.low\n",
    ],
    ids=["function", "method", "type-checkers", "other-package"],
)
def test_what_is_not_loaded_with_a_module_makes_no_floor(source: str) -> None:
    assert len(heights(package(high=source, low=""))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    import octavo.scheduler.low\nexcept ImportError:\n    pass\n",
        "try:\n    import tomllib\nexcept ImportError:\n    import octavo.scheduler.low\n",
        "if True:\n    pass\nelse:\n    from octavo.scheduler import low\n",
        "class C:\n    from octavo.scheduler.low import f\n",
    ],
    ids=["try", "except", "else", "class"],
)
def test_what_is_loaded_in_any_way_makes_a_floor(source: str) -> None:
    assert heights(package(high=source, low="")) == [["high"], ["low"]]


def test_a_circle_is_one_floor() -> None:
    modules = package(
        a="import octavo.scheduler.b\n",
        b="import octavo.scheduler.c\n",
        c="import octavo.scheduler.a\nimport octavo.scheduler.d\n",
        d="",
    )
    assert heights(modules) == [["a", "b", "c"], ["d"]]


def test_fields_are_those_declared_and_others_are_noted(tmp_path: Path) -> None:
    source = """
class Sequence:
    index: int
    tokens: list[int] = field(default_factory=list)
    LIMIT: ClassVar[int] = 3
    not_annotated = 1
    def __post_init__(self):
        self.tokens = []
        self.made: int = 0
        self.index, self.other = 1, 2
"""
    found = figures(tmp_path, {f"{SCHEDULER}/sequence.py": source})["fields: Sequence"]
    assert (found.value, found.note) == (2, "2 more made by methods")
    assert found.places == ["index", "tokens", "made", "other"]


def test_a_class_that_is_gone_or_there_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="2 classes Replica"):
        figures(tmp_path, {f"{SCHEDULER}/other.py": "class Replica:\n    pass\n"})
    (tmp_path / f"{SCHEDULER}/other.py").unlink()
    with pytest.raises(LookupError, match="0 classes Sequence"):
        figures(tmp_path, {f"{SCHEDULER}/sequence.py": "class Order:\n    pass\n"})


def test_places_of_a_sampling_field_and_of_an_option(tmp_path: Path) -> None:
    found = figures(
        tmp_path,
        {
            "proto/octavo/v1/generation.proto": "optional double repetition_penalty = 1;\n",
            "worker/octavo/worker/a.py": "repetition_penalty = 1.0\nswap_memory = 1\n",
            "worker/octavo/worker/b.py": "my_repetition_penalty = 1.0\n",
            "worker/octavo/worker/c.py": '"--swap-memory"\n',
            "frontend/octavo/llm/d.py": '"""`python -m tests.option_pages` writes this file."""\n\nswap_memory: int\n',
            "compose.yaml": "x:\n    OCTAVO_SWAP_MEMORY:\n",
            "docs/deployment.md": "| `OCTAVO_SWAP_MEMORY` | worker |\n",
            "docs/swapping.md": "| `OCTAVO_SWAP_MEMORY` | worker |\n\nSet `OCTAVO_SWAP_MEMORY`.\n",
            "docs/api.md": "repetition_penalty\n",
            "docs/house.md": "`swap_memory` is counted\n",
            "tests/test_a.py": "repetition_penalty = swap_memory\n",
        },
    )
    expected = ["proto/octavo/v1/generation.proto", "worker/octavo/worker/a.py"]
    assert found["files for a new sampling field"].places == expected
    expected = ["docs/swapping.md", "worker/octavo/worker/a.py", "worker/octavo/worker/c.py"]
    written = ["compose.yaml", "docs/deployment.md", "frontend/octavo/llm/d.py"]
    counted = found["files for a new option"]
    assert (counted.value, counted.places[:3]) == (3, expected)
    assert counted.places[3:] == [f"{path} (written by a command)" for path in written]


def test_the_contract_is_messages_and_api_and_nothing_beside_them(tmp_path: Path) -> None:
    found = figures(
        tmp_path,
        {
            "proto/octavo/v1/a.proto": "1\n2\n",
            "proto/octavo/wire/base.py": "3\n",
            "proto/octavo/runtime/telemetry/logs.py": "4\n5\n6\n7\n",
        },
    )["contract lines"]
    assert (found.value, found.note) == (3, "of them 2 of .proto")


def test_the_core_is_what_it_loads_while_files_lie_loose(tmp_path: Path) -> None:
    loose = {
        f"{SCHEDULER}/scheduler.py": loading("sequence"),
        f"{SCHEDULER}/shell.py": loading("scheduler") + "\n\n\n",
    }
    assert figures(tmp_path, loose)["core and kv lines"].value == 3


def test_the_core_is_its_rooms_once_there_are_some(tmp_path: Path) -> None:
    rooms = {
        f"{SCHEDULER}/scheduler.py": "1\n",
        f"{SCHEDULER}/core/events.py": "1\n2\n3\n4\n",
        f"{SCHEDULER}/kv/blocks.py": "5\n",
        f"{SCHEDULER}/kvetch.py": "6\n",
    }
    assert figures(tmp_path, rooms)["core and kv lines"].value == 5


@pytest.mark.parametrize(
    ("sentence", "dangles", "has_verb"),
    [
        ("What a step computes.", True, True),
        ("Whether it did.", True, True),
        ("Of each row some logits that none left out is above the `count` largest of.", True, True),
        ("Those of all roles that are there.", True, True),
        ("They do not, with what would make them.", True, True),
        ("By the rules of beams.", True, False),
        ("Until cancelled.", True, False),
        ("With keys the processes know each other.", False, True),
        ("Returns the free blocks.", False, True),
        ("Copies the block.", False, True),
        ("Passes it on.", False, True),
        ("Return the free blocks.", False, True),
        ("A worker offers itself, and is welcomed.", False, True),
        ("The page, in Markdown.", False, False),
        ("`is` in code says nothing.", False, True),
        ("`are`, `is` and `has`.", False, False),
        ("", False, False),
    ],
)
def test_openings_and_verbs(sentence: str, dangles: bool, has_verb: bool) -> None:
    docstring = Docstring("a.py:1", sentence)
    assert (docstring.dangles, docstring.has_verb) == (dangles, has_verb)


def test_only_first_sentences_count() -> None:
    source = '''
"""The page. What it says."""
class A:
    """A name

    Which is long."""
    def f(self):
        """Writes it! Or not."""
    async def g(self): pass
'''
    read = [(each.place.rpartition(":")[2], each.sentence) for each in read_docstrings(module("octavo.a", source))]
    assert read == [("2", "The page."), ("4", "A name"), ("8", "Writes it!")]


def test_shares_of_docstrings(tmp_path: Path) -> None:
    source = '"""What it is."""\ndef f():\n    """Returns it."""\ndef g():\n    """A thing."""\ndef h(): pass\n'
    found = figures(tmp_path, {"worker/octavo/worker/a.py": source})
    dangling = found["docstrings with a dangling opening, %"]
    assert (dangling.value, dangling.note) == (33.3, "1 of 3")
    assert dangling.places == ["worker/octavo/worker/a.py:1: What it is."]
    assert found["docstrings without a verb, %"].places == ["worker/octavo/worker/a.py:5: A thing."]


def test_a_module_is_documented_where_a_readme_of_its_root_names_its_file(tmp_path: Path) -> None:
    found = figures(
        tmp_path,
        {
            "scheduler/README.md": "`sequence.py` is one; my_replica.py, replica.pyx and block-replica.py are none.\n",
            "worker/octavo/worker/models/README.md": "models/llama.py\n",
            "worker/octavo/worker/models/llama.py": "",
            "worker/octavo/worker/__init__.py": "",
            "worker/octavo/worker/sequence.py": "",
            "docs/architecture.md": "replica.py\n",
        },
    )["modules in no README"]
    assert found.places == [f"{SCHEDULER}/replica.py", "worker/octavo/worker/sequence.py"]
    assert found.note == "scheduler 1, worker 1"


def test_names_of_public_classes_are_shared_across_the_namespace(tmp_path: Path) -> None:
    found = figures(
        tmp_path,
        {
            "proto/octavo/wire/a.py": "class Request: pass\nclass _Own: pass\nclass Once: pass\n",
            "frontend/octavo/frontend/a.py": "class Request: pass\nclass _Own: pass\ndef f():\n    class Once: pass\n",
            "frontend/octavo/frontend/b.py": "class Request: pass\n",
        },
    )["public class names used twice"]
    assert found.places == ["Request: octavo.wire.a, octavo.frontend.a, octavo.frontend.b"]


def test_lengths_of_files_and_functions(tmp_path: Path) -> None:
    source = """
@decorated
@twice
def f():
    return 1
class A:
    async def g(self):
        a = 1
        b = 2
        return a
"""
    pages = {"tests/a/b/c/test_a.py": "1\n2\n", "README.md": "1\n\n"}
    found = figures(tmp_path, {"worker/octavo/worker/a.py": source} | pages)
    assert found["file median"].value == 2
    assert found["function median"].value == 3
    assert (found["longest function"].value, found["longest function"].note) == (4, "worker/octavo/worker/a.py:7 g")
    assert found["tests/ lines"].value == 2
    assert found["README lines"].value == 2


@pytest.mark.parametrize(
    ("values", "expected"), [([], 0), ([7], 7), (list(range(1, 101)), 95), (list(range(1, 21)), 19), ([1, 9], 9)]
)
def test_a_percentile_is_the_least_value_that_enough_do_not_exceed(values: list[int], expected: int) -> None:
    assert percentile(values, 95) == expected


def test_table_json_and_list_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(tmp_path, {})
    written = tmp_path / "house.json"
    assert main(["--checkout", str(tmp_path), "--json", str(written)]) == 0
    rows = re.findall(r"^\| (.+?) +\| ([\d.,]+) +\| (?:<= ([\d.,]+))? *\|", capsys.readouterr().out, re.MULTILINE)
    decoded = json.loads(written.read_text(encoding="utf-8"))
    assert [name for name, _, _ in rows] == list(decoded)
    assert {name: float(value.replace(",", "")) for name, value, _ in rows} == {
        name: entry["value"] for name, entry in decoded.items()
    }
    assert main(["--checkout", str(tmp_path), "--list", "fields: Seq"]) == 0
    assert capsys.readouterr().out == "fields: Sequence: 1\n  index\n"


def test_a_figure_that_is_none_is_refused(tmp_path: Path) -> None:
    plant(tmp_path, {})
    with pytest.raises(SystemExit) as error:
        main(["--checkout", str(tmp_path), "--list", "no such figure"])
    assert error.value.code == 2


def test_every_import_root_of_this_checkout_is_counted() -> None:
    assert set(ROOTS) == {path.parent.name for path in REPOSITORY.glob("*/octavo") if path.is_dir()}
    assert {module.root for module in read_modules(REPOSITORY)} == set(ROOTS)


def test_this_checkout_can_be_measured() -> None:
    found = {figure.name: figure for figure in measure(REPOSITORY)}
    empty = {name for name, figure in found.items() if not figure.value}
    assert empty <= {"modules in no README", "docstrings with a dangling opening, %"}
