"""Compiles the CPU kernels when Octavo is installed or its wheel is built; either goes on without a compiler."""

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_BUILD = "kernels/octavo/kernels/native/build.py"


class KernelsHook(BuildHookInterface[Any]):
    """Leaves the library in the source tree, where an editable install finds it, and puts it into a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # By path: nothing of Octavo is installed yet.
        kernels = runpy.run_path(str(Path(self.root, _BUILD)))
        try:
            if not kernels["is_current"]():
                kernels["build"]()
        except (kernels["BuildError"], OSError) as error:
            # The first line: what a compiler has to say is for those who ask for the kernels alone.
            self.app.display_warning(kernels["not_compiled"](error).splitlines()[0])
            return
        if version == "standard":
            machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["artifacts"].append(kernels["LIBRARY"].relative_to(self.root).as_posix())
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{machine}"
