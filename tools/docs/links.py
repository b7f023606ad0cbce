"""For mkdocs: links to files that are not pages become their text, or links into the repository.

Docstrings name others by roles, ":meth:`x`", of which the name stays; of "Example::" one colon.
Calls in tables may break behind brackets and commas, so that phones show them.

Pages link to headers, scripts and tests beside docs/, which a site does not have. With
BAGUA_PROJECT_URL, the address of the project's files, such links go there.
"""

import os
import posixpath
import re
from pathlib import Path

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#|mailto:)([^)\s]+)\)")

ROLE = re.compile(r":(?:attr|class|data|func|meth):(?=\s*<code)")


CELL = re.compile(r"<td\b.*?</td>", re.S)
CALL = re.compile(r"(<code>)([^<]+)(</code>)")
VERSION = re.compile(r'^version = "(.+)"$', re.M)


def on_config(config):
    """The header of every page names the version."""
    project = Path(config.config_file_path).with_name("pyproject.toml")
    config.site_name += " " + VERSION.search(project.read_text()).group(1)
    return config


def on_page_content(html, **_):
    html = ROLE.sub("", html).replace("Example::</p>", "Example:</p>")
    return CELL.sub(lambda cell: CALL.sub(_breakable, cell.group()), html)


def _breakable(code):
    before, text, after = code.groups()
    return before + re.sub(r"([(,])(?=[^\s)])", r"\1<wbr>", text) + after


def on_page_markdown(markdown, page, config, files):
    pages = {file.src_uri for file in files.documentation_pages()} | {
        file.src_uri for file in files.media_files()
    }
    folder = posixpath.dirname(page.file.src_uri)
    url = os.environ.get("BAGUA_PROJECT_URL", "").rstrip("/")

    def replace(link):
        words, target = link.groups()
        path, _, anchor = target.partition("#")
        file = posixpath.normpath(posixpath.join(folder, path))
        if file in pages and not file.endswith(".py"):
            return link.group()
        in_repository = posixpath.normpath(posixpath.join("docs", file))
        if not (Path(config.config_file_path).parent / in_repository).exists():
            return link.group()  # dead: mkdocs says so
        return f"[{words}]({url}/{in_repository}{'#' + anchor if anchor else ''})" if url else words

    return LINK.sub(replace, markdown)
