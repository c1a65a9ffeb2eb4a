"""keep_bytecode.py ENV: what Python compiled in an environment of links is kept beside the files that they lead to.

uv links to these files in the next environment too, which then need not be compiled again.
"""

import shutil
import sys
from pathlib import Path

for compiled in Path(sys.argv[1]).rglob("__pycache__/*.pyc"):
    source = compiled.parent.parent / f"{compiled.name.split('.')[0]}.py"
    if source.is_symlink():
        folder = source.resolve().parent / "__pycache__"
        folder.mkdir(exist_ok=True)
        shutil.copy2(compiled, folder / compiled.name)
