"""Hooks of MkDocs: links of docs/ to pages and to the rest of the repository, and the order of the search.

The pages link to files by their paths in the repository, such as ../dgc/ddp.py. The site has a page for each of
these files and folders, below repository/, and therefore needs no address of the repository. A link whose text is
the file name of a page gets the page's title. A picture links to its file, in which it has its full size.

In the search, a page that describes something precedes the API, which repeats its words. The list of changes
is not in it.
"""

import re
from collections.abc import Iterator
from os.path import normpath, relpath
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = PurePosixPath("docs")
# mkdocs.yml names their pages
ALWAYS = [PurePosixPath("README.md"), PurePosixPath("CONTRIBUTING.md"), PurePosixPath("CHANGELOG.md")]
LINK = re.compile(r"\[([^\[\]]*)\]\((?!https?:|mailto:)([^)#\s]+)(#[^)\s]+)?\)")
BLOCK = re.compile(r"(^ *```.*?^ *```)", re.S | re.M)
LANGUAGES = {".py": "python", ".cpp": "cpp", ".h": "cpp", ".sh": "bash", ".yml": "yaml", ".cff": "yaml"}
OTHERS = {".md", ".toml", ".txt", ".rules"}
HIDDEN = "---\nsearch: {exclude: true}\nhide: [navigation, toc]\n---\n\n"
FENCE = "~" * 8
PICTURE = re.compile(r'<img [^>]*src="([^"]+\.svg)"[^>]*>')
CHANGES = "repository/changelog.md"
BOOSTS = {"api/": 0.003, "methods.md": 3.0, "extending.md": 2.0}  # of the search, by the path's beginning


def place(path: PurePosixPath) -> PurePosixPath:
    """Where the site has the Markdown of a page for this path of the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS)
    if (ROOT / path).is_dir():
        return "repository" / path / "index.md"
    name = path.name.lower() if path.suffix == ".md" else f"{path.name}.md"
    return "repository" / path.with_name(name)


def link_to(path: PurePosixPath, page: PurePosixPath) -> str:
    return relpath(place(path), place(page).parent)


def target_of(link: re.Match[str], page: PurePosixPath) -> PurePosixPath | None:
    """The path that a page's link leads to, or None if there is no such file or folder: MkDocs reports it then."""
    path = PurePosixPath(normpath(page.parent / link[2]))
    return path if (ROOT / path).exists() else None


def prose(text: str) -> list[str]:
    """The parts of a page: prose at even places, fenced blocks between them."""
    return BLOCK.split(text)


def linked(text: str, page: PurePosixPath) -> Iterator[PurePosixPath]:
    """The paths that the page links to."""
    for part in prose(text)[::2]:
        for link in LINK.finditer(part):
            if path := target_of(link, page):
                yield path


def title(path: PurePosixPath) -> str:
    return (ROOT / path).read_text().split("# ", 1)[1].splitlines()[0]


def rewritten(text: str, page: PurePosixPath) -> str:
    """The text of a page with links to the pages of the site."""

    def replaced(link: re.Match[str]) -> str:
        path = target_of(link, page)
        if path is None:
            return link[0]
        named = path.suffix == ".md" and link[1] in (path.name, str(path))
        return f"[{title(path) if named else link[1]}]({link_to(path, page)}{link[3] or ''})"

    parts = prose(text)
    parts[::2] = [LINK.sub(replaced, part) for part in parts[::2]]
    return "".join(parts)


def entries(folder: PurePosixPath) -> list[PurePosixPath]:
    """The folders and text files of a folder, folders first."""
    found = [path for path in (ROOT / folder).iterdir() if path.name[:1] != "." and path.name != "__pycache__"]
    kept = [path for path in found if path.is_dir() or path.suffix in LANGUAGES or path.suffix in OTHERS]
    return [folder / path.name for path in sorted(kept, key=lambda path: (path.is_file(), path.name))]


def page_of(path: PurePosixPath) -> str:
    """The Markdown of the page for a file or folder outside docs/."""
    if (ROOT / path).is_dir():
        links = [f"- [`{entry.name}`]({link_to(entry, path)})\n" for entry in entries(path)]
        return f"{HIDDEN}# `{path}/`\n\n{''.join(links)}"
    text = (ROOT / path).read_text()
    if path.suffix == ".md":
        return rewritten(text, path)
    return f"{HIDDEN}# `{path}`\n\n{FENCE} {LANGUAGES.get(path.suffix, 'text')}\n{text}\n{FENCE}\n"


def reached() -> list[PurePosixPath]:
    """Every file and folder outside docs/ that a page links to, directly or through other pages and folders."""
    waiting = [*ALWAYS, *(PurePosixPath(path.relative_to(ROOT)) for path in sorted((ROOT / DOCS).rglob("*.md")))]
    found: dict[PurePosixPath, None] = {}
    while waiting:
        path = waiting.pop(0)
        if path in found:
            continue
        found[path] = None
        if (ROOT / path).is_dir():
            waiting += entries(path)
        elif path.suffix == ".md":
            waiting += linked((ROOT / path).read_text(), path)
    return [path for path in found if not path.is_relative_to(DOCS)]


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File, InclusionLevel

    for path in reached():
        inclusion = InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, str(place(path)), content=page_of(path), inclusion=inclusion))
    return files


def search_of(uri: str) -> dict[str, Any]:
    """The settings of the search for a page of the navigation."""
    if uri == CHANGES:
        return {"exclude": True}
    return next(({"boost": factor} for start, factor in BOOSTS.items() if uri.startswith(start)), {})


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if settings := search_of(page.file.src_uri):
        page.meta["search"] = settings
    return markdown if page.file.generated_by else rewritten(markdown, DOCS / page.file.src_uri)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    return PICTURE.sub(r'<a href="\1">\g<0></a>', html)
