"""The command line: ``python -m real_gpus``."""

import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product, repeat
from pathlib import Path
from typing import Annotated, Final

import typer

from measuring.files import DOCS
from measuring.nodes import artifacts
from measuring.results import machine_text, write_page
from proofserve.cli.session import EXIT_FAILED, open_session
from proofserve.remote.node_client import NodeClient
from proofserve.reports import ReportedError
from proofserve.verifier.claims import document, kernel_facts
from proofserve.verifier.orders import WorkOptions, order_of
from real_gpus.deployments import FOLDER, groups, read
from real_gpus.page import PARTS, convicted_honest, deployments_csv, draw, page, verdicts_csv
from real_gpus.trying import judged, together

PAGE: Final = DOCS / "real-gpus.md"
# Nonces in one call of a node.
AT_ONCE: Final = 32

app = typer.Typer(help="Vectors of real GPUs, and how verdicts by other nodes judge them.")


@app.command()
def run(
    folder: Annotated[
        list[Path] | None, typer.Option(help="A folder of files besides those that are here.")
    ] = None,
    orders: Annotated[int, typer.Option(help="Of each choice of references and node.")] = 1000,
    nonces: Annotated[int, typer.Option(help="The longest verification.")] = 100,
    into: Annotated[
        Path, typer.Option(help="The page; its tables and picture are beside it.")
    ] = PAGE,
) -> None:
    """Judge all deployments, and write docs/real-gpus.md (a quarter of an hour on two cores).

    Exit code 1: an honest deployment was convicted.
    """
    with open_session() as session, session.interrupts.allowed():
        known = groups([FOLDER, *(folder or ())])
        jobs = list(product(known, range(PARTS)))
        text = f"judging {len(known)} models, {orders} orders each"
        each, seeds = zip(*jobs, strict=True)
        sizes = repeat(max(1, orders // PARTS)), repeat(nonces)
        with ProcessPoolExecutor(os.cpu_count()) as processes:
            ended = processes.map(judged, each, *sizes, seeds)
            done = zip(session.line.over(text, jobs), ended, strict=True)
            parts = [kinds for _, kinds in done]
        found = [
            (group, together(parts[i * PARTS : (i + 1) * PARTS])) for i, group in enumerate(known)
        ]
        write_page(into, page(found, orders, nonces, machine_text()), session.tell)
        into.with_suffix(".csv").write_text(verdicts_csv(found))
        into.with_name(f"{into.stem}-deployments.csv").write_text(deployments_csv(known))
        draw(known, into.with_suffix(".png"))
        if wrong := convicted_honest(found):
            session.tell("\n".join(wrong))
            raise typer.Exit(EXIT_FAILED)


@app.command()
def record(
    url: Annotated[str, typer.Argument(help="A node of yours.")],
    like: Annotated[str, typer.Option(help="A deployment of this folder: its nonces are asked.")],
    weights: Annotated[str, typer.Option(help="What the node serves: FP8, INT4, ...")],
    source: Annotated[str, typer.Option(help="Who publishes it, and under which licence.")],
    name: Annotated[str | None, typer.Option(help="Of the file; the card if unset.")] = None,
    cheap: Annotated[bool, typer.Option(help="It serves other weights than the model's.")] = False,
    nonces: Annotated[int, typer.Option(help="How many of them.", min=24)] = 1000,
    api_key: Annotated[str | None, typer.Option(envvar="POC_API_KEY", help="Its key.")] = None,
) -> None:
    """Have a node compute the nonces of a deployment, and write it beside that."""
    with open_session() as session, session.interrupts.allowed():
        model = read(FOLDER / f"{like}.json")
        asked = model.claimed.nonces[:nonces]
        order = order_of(model.claimed, WorkOptions())
        with NodeClient(url, api_key) as node:
            facts = kernel_facts(url, node.kernels())
            order = replace(order, model=str(node.models()[0]))
            claims = artifacts(node, order, asked, AT_ONCE, session.line)
        title = str(facts.get("processor") or "a node")
        file = FOLDER / f"{name or '-'.join(title.lower().split())}.json"
        if file.exists():
            raise ReportedError(f"{file} exists; give --name")
        deployment = {
            **{"model": model.facts.model, "weights": weights, "honest": not cheap},
            "source": source,
        }
        made = {"deployment": deployment, **document(order, claims, facts)}
        file.write_text(json.dumps(made, indent=1))
        session.tell(f"wrote {file}")


if __name__ == "__main__":
    app()
