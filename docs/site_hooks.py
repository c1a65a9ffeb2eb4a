"""Hooks of the site's builder: pages of the repository that lie outside `docs/` become pages of the site.

A link such as `../SCOPE.md` works on a forge. The site gets a copy of the file under `repository/`, and the link points
to the copy. Links from such a copy to files that are not pages become plain text.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]

LINK = re.compile(r"(?<!\\)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")

FLOWCHART = re.compile(r'<pre class="mermaid"><code>(?:%%.*\n)?flowchart .*?</pre>', re.DOTALL)


def linked_outside(text: str, folder: Path) -> list[Path]:
    """Return the Markdown and JSON files outside `docs/` that a text links to, relative to the repository."""
    found = []
    for _, target, _ in LINK.findall(text):
        path = (folder / target).resolve()
        inside = path.is_relative_to(ROOT / "docs")
        if path.suffix in (".md", ".json") and path.is_file() and path.is_relative_to(ROOT) and not inside:
            found.append(path.relative_to(ROOT))
    return found


def on_files(files: Files, config: Any) -> Files:
    """Add every page outside `docs/` that a page links to, and the pages that those link to."""
    waiting = [path for page in (ROOT / "docs").rglob("*.md") for path in linked_outside(page.read_text(), page.parent)]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        name = f"repository/{path.as_posix()}"
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
        if path.suffix == ".md":
            waiting += linked_outside((ROOT / path).read_text(), (ROOT / path).parent)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links to the copies in the site."""
    source = page.file.src_uri
    of_repository = source.startswith("repository/")
    folder = ROOT / posixpath.dirname(source.removeprefix("repository/") if of_repository else f"docs/{source}")

    def mend(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = (folder / target).resolve()
        if path.is_relative_to(ROOT / "docs"):
            name = path.relative_to(ROOT / "docs").as_posix()
        else:
            name = f"repository/{path.relative_to(ROOT).as_posix()}" if path.is_relative_to(ROOT) else ""
        if files.get_file_from_path(name) is None:
            return text if of_repository else match[0]
        return f"[{text}]({posixpath.relpath(name, posixpath.dirname(source) or '.')}{anchor})"

    return LINK.sub(mend, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Put flowcharts, which are wide, into boxes that scroll."""
    return FLOWCHART.sub(r'<div class="flowchart">\g<0></div>', html)
