"""Rows for a module of torch whose import takes long: applied when the program imports it."""

import sys
from collections.abc import Callable

from multigpu.virtual.after_torch import After
from multigpu.virtual.patches.replacing import Table


def when_imported(module: str, table: Table) -> Callable[[], Callable[[], None]]:
    """The change of a Setting: `table`'s rows, now or as soon as `module` is imported."""

    def change() -> Callable[[], None]:
        finder = After(module, table.apply)
        if module in sys.modules:
            table.apply()
        else:
            sys.meta_path.insert(0, finder)

        def restore() -> None:
            finder.remove()
            table.undo()

        return restore

    return change
