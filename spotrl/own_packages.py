"""Import spotrl's own `engine` and `launcher`, whatever lies beside the user's notebook.

A notebook's folder is the first place where Python looks, so a user's own `engine.py` would be imported in place of
spotrl's package. The packages lie beside this one, and are imported from there by their path. Programs that spotrl
starts run with `python -P`, which leaves the folder out.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

BESIDE = Path(__file__).resolve().parent.parent
NAMES = ("engine", "launcher")


def take_own(beside: Path = BESIDE) -> None:
    """Import the packages that lie in `beside`. Raises ImportError if another module of such a name is in use."""
    for name in NAMES:
        ours = beside / name / "__init__.py"
        loaded = sys.modules.get(name)
        if loaded is not None:
            file = getattr(loaded, "__file__", None)
            if file is None or Path(file).resolve() != ours.resolve():
                raise ImportError(
                    f"{file} was imported as `{name}` before spotrl, which has a package of that name; import spotrl "
                    "first, or rename the file"
                )
            continue
        spec = spec_from_file_location(name, ours, submodule_search_locations=[str(ours.parent)])
        if spec is None or spec.loader is None or not ours.exists():
            raise ImportError(f"{ours} is missing: spotrl is not installed whole; install it again")
        module = module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
