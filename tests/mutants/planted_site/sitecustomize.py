"""Plant bugs into this process when it imports the modules that have them.

Python imports this module at every start while this folder is on PYTHONPATH. Without the variable SPOTRL_PLANTED_BUG
nothing happens. The variable names a file: a JSON list of edits {"module", "old", "new"}. In the source of each module,
`old` occurs once and is replaced by `new`. The product has no line of this.

A forked process has the modules of its parent, with their bugs. No bytecode of a changed source is read or written.
Every process that plants a bug appends a line to the file with `.planted` at the end of its name. Standard library
only, and no module that a small process would not import anyway.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader

VARIABLE = "SPOTRL_PLANTED_BUG"


class PlantedLoader(SourceFileLoader):
    """Loads a module's source with its edits."""

    edits = ()

    def get_code(self, fullname):
        source = self.get_source(fullname)
        for old, _ in self.edits:
            if source.count(old) != 1:
                raise ImportError(f"{fullname} has {source.count(old)} times and not once: {old}")
        for old, new in self.edits:
            source = source.replace(old, new)
        return compile(source, self.path, "exec", dont_inherit=True)


class PlantedFinder:
    """Finds the modules that have bugs, and leaves all others to Python."""

    def __init__(self, file):
        import json

        self._log = f"{file}.planted"
        self._edits = {}
        with open(file) as opened:
            for edit in json.load(opened):
                self._edits.setdefault(edit["module"], []).append((edit["old"], edit["new"]))

    def find_spec(self, fullname, path=None, target=None):
        edits = self._edits.get(fullname)
        if edits is None:
            return None
        found = self._found(fullname, path, target)
        if found is None or found.origin is None:
            return None
        loader = PlantedLoader(fullname, found.origin)
        loader.edits = edits
        spec = ModuleSpec(fullname, loader, origin=found.origin)
        spec.has_location = True
        line = f"{os.getpid()} {fullname} {' '.join(sys.orig_argv[:6])[:200]!r}\n"
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(log, line.encode())
        os.close(log)
        return spec

    def _found(self, fullname, path, target):
        found = PathFinder.find_spec(fullname, path, target)
        if found is not None:
            return found
        for finder in sys.meta_path:  # an editable installation has a finder of its own
            if finder is not self and finder is not PathFinder and hasattr(finder, "find_spec"):
                found = finder.find_spec(fullname, path, target)
                if found is not None:
                    return found
        return None


if VARIABLE in os.environ:
    sys.meta_path.insert(0, PlantedFinder(os.environ[VARIABLE]))
