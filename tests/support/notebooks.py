"""Run the code cells of a notebook in order, as Jupyter would, without Jupyter.

    python -m tests.support.notebooks examples/first_pipeline.ipynb

rewrites the outputs of the notebook. A cell with the tag `output-varies` shows measured figures.
"""

from __future__ import annotations

import ast
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def run_cells(path: Path) -> list[tuple[Json, list[Json]]]:
    """Return each code cell of a notebook with the outputs that it gives now, in the format of notebooks."""
    names: dict[str, object] = {"__name__": "__main__"}
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    try:
        return [(cell, run_cell(cell, number, names)) for number, cell in enumerate(cells, 1)]
    finally:
        names.clear()  # the worker threads of pipelines end with the last reference to each


def run_cell(cell: Json, number: int, names: dict[str, object]) -> list[Json]:
    """Run a cell: the printed text is one output, and the value of a last expression another one."""
    tree = ast.parse("".join(cell["source"]))
    end = tree.body[-1] if tree.body else None
    last = end.value if isinstance(end, ast.Expr) else None
    if last is not None:
        tree.body.pop()
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(tree, f"cell {number}", "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last), f"cell {number}", "eval"), names)
    outputs: list[Json] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue().splitlines(True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(True)
        outputs.append({"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data})
    return outputs


def varies(cell: Json) -> bool:
    """Return whether a cell shows measured figures."""
    return "output-varies" in cell["metadata"].get("tags", ())


def rewrite_outputs(path: Path) -> None:
    """Run a notebook, and write the outputs of its cells into it."""
    ran = iter(run_cells(path))
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, (_, outputs)) in enumerate(zip(code, ran, strict=True), 1):
        cell["outputs"], cell["execution_count"] = outputs, number
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        rewrite_outputs(Path(name))
