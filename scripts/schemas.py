"""Writes docs/api: OpenAPI of our servers, and JSON Schemas of what they send and commands write.

    python -m scripts.schemas

All of it is made from the models by which the code reads and answers. ``docs/api/examples`` has
payloads of a real run, a list for each schema; those of a server's answers are put into its page.
"""

import asyncio
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter

from proofserve import __version__
from proofserve.api.proof_routes import measure_router
from proofserve.api.routes import router
from proofserve.gateway.app import build
from proofserve.gateway.records import BackendSpec, ClientSpec, GatewayPlan
from proofserve.receiver.app import create_app
from proofserve.receiver.callbacks import AnyGenerated, AnyValidated
from proofserve.receiver.store import ReceiverStore
from proofserve.settings.fleet import FleetSettings
from proofserve.verifier.bundle import Bundle
from proofserve.verifier.calibration_file import CalibrationFile
from proofserve.verifier.challenge import TallyRecord
from proofserve.verifier.chat.verification import ChatRecord
from proofserve.verifier.chat.watching import WatchRecord
from proofserve.verifier.judging import UnprovedRecord, VerdictRecord
from proofserve.verifier.probe.report import ProbeRecord
from proofserve.wire.signed import LoggedEntries
from proofserve.wiring.fleet import running_fleet

FOLDER = Path(__file__).parent.parent / "docs" / "api"
EXAMPLES = FOLDER / "examples"
# Levels of an object of which each part has its own line.
LINES_DEEP = 3
DIALECT = "https://json-schema.org/draft/2020-12/schema"
# What is read, and what is written: a field with a default may be missing from the former alone.
READ: dict[str, Any] = {
    "callback-generated": AnyGenerated,
    "callback-validated": AnyValidated,
    "callback-logged": LoggedEntries,
    "bundle": Bundle,
    "calibration": CalibrationFile,
}
WRITTEN: dict[str, Any] = {
    "report-verify": VerdictRecord | UnprovedRecord,
    "report-challenge": TallyRecord,
    "report-verify-chat": ChatRecord,
    "report-watch-chat": WatchRecord,
    "report-probe": ProbeRecord,
}
OF_NODES = (
    "The proof endpoints of a node. Beside them its vLLM serves its own, which"
    " https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html describes."
)


def documents() -> dict[str, dict[str, Any]]:
    """Every file of the folder by its name."""
    pages = {"node": _node(), "gateway": _gateway(), **asyncio.run(_with_databases())}
    made = {f"{name}.openapi.json": _with_examples(name, page) for name, page in pages.items()}
    for names, mode in ((READ, "validation"), (WRITTEN, "serialization")):
        for name, model in names.items():
            schema = TypeAdapter(model).json_schema(mode=mode)  # type: ignore[arg-type]
            made[f"{name}.schema.json"] = {"$schema": DIALECT, **schema}
    return made


def _node() -> dict[str, Any]:
    def no_node(_request: object) -> Any:
        raise AssertionError("this application is only described")

    app = FastAPI(title="proofserve node", version=__version__, description=OF_NODES)
    app.include_router(router(no_node))
    app.include_router(measure_router(no_node, no_node))
    return app.openapi()


def _gateway() -> dict[str, Any]:
    clients = (ClientSpec(name="anna", key="key"),)
    plan = GatewayPlan((BackendSpec("http://127.0.0.1:8001"),), clients, admin_key="key")
    return build(plan).openapi()


async def _with_databases() -> dict[str, dict[str, Any]]:
    with TemporaryDirectory() as folder:
        store = ReceiverStore.open(Path(folder) / "received.sqlite")
        receiver = create_app(store).openapi()
        store.close()
        settings = FleetSettings(database=f"{folder}/fleet.sqlite", api_key=("key",))
        async with running_fleet(settings, "http://127.0.0.1:7100") as fleet:
            return {"receiver": receiver, "fleet": fleet.openapi()}


def _with_examples(name: str, page: dict[str, Any]) -> dict[str, Any]:
    file = EXAMPLES / f"{name}.json"
    answers = json.loads(file.read_text()) if file.exists() else {}
    for operation, answer in answers.items():
        method, path = operation.split()
        answered = page["paths"][path][method.lower()]["responses"]["200"]
        answered["content"]["application/json"]["example"] = answer
    return page


def text_of(document: dict[str, Any]) -> str:
    """Has a line for each operation of a page, each of its models, and each part of a schema."""
    return f"{_lines(document, LINES_DEEP)}\n"


def _lines(value: Any, deep: int, indent: str = "\n ") -> str:
    if not (deep and value and isinstance(value, dict)):
        return json.dumps(value, ensure_ascii=False)
    parts = {name: _lines(part, deep - 1, f"{indent} ") for name, part in value.items()}
    lines = f",{indent}".join(f"{json.dumps(name)}: {part}" for name, part in parts.items())
    return f"{{{indent}{lines}{indent[:-1]}}}"


def main() -> None:
    for name, document in documents().items():
        (FOLDER / name).write_text(text_of(document), encoding="utf-8")


if __name__ == "__main__":
    main()
