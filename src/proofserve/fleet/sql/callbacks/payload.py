"""The body of a callback to the network (protocol A.8, B.7), read in pieces."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from proofserve.fleet import vector_texts
from proofserve.fleet.sql import rounds
from proofserve.fleet.sql.batches import results
from proofserve.fleet.sql.callbacks import deliveries
from proofserve.fleet.sql.database import FleetDatabase
from proofserve.fleet.sql.tables import AnyRow
from proofserve.outbox.callbacks import Delivery, Span
from proofserve.rounds.records import RoundSpec, Target
from proofserve.wire.records import encoding_of

# Batches in one transaction, so that on SQLite new results need not wait for a large body.
_PAGE = 16


async def body(database: FleetDatabase, delivery: Delivery) -> bytes:
    """The body of ``delivery``. Raises StoreUnavailable."""
    if delivery.span is None or delivery.round_id is None:
        return (await database.read(deliveries.stored_body, delivery)).encode()
    found = await database.read(rounds.find, delivery.round_id)
    if found is None:
        raise AssertionError(f"the round of callback {delivery.id} is gone")
    spec = found.spec
    pages = [
        await asyncio.to_thread(_parts, rows, spec)
        async for rows in _pages(database, delivery.span)
    ]
    if spec.commits_roots:
        return pages[0]["body"].encode()
    work = spec.work
    head = {
        "public_key": work.public_key,
        "block_hash": work.block.hash,
        "block_height": work.block.height,
        "node_id": spec.lane.node_id if spec.lane else None,
    }
    members = [_dumps(head)[1:-1]]
    members += [f'"{name}":[{",".join(page[name] for page in pages)}]' for name in pages[0]]
    members.append(_dumps(_tail(spec, spec.target))[1:-1])
    return await asyncio.to_thread(f"{{{','.join(members)}}}".encode)


def _tail(spec: RoundSpec, target: Target | None) -> dict[str, Any]:
    if target is not None:
        return {"r_target": target.r_target}
    return {"encoding": encoding_of(spec.work.scheme.width)}


async def _pages(database: FleetDatabase, span: Span) -> AsyncIterator[list[AnyRow]]:
    after = span.first_seq - 1
    while rows := await database.read(deliveries.batch_page, span, after, _PAGE):
        after = rows[-1].number
        yield rows


def _parts(rows: list[AnyRow], spec: RoundSpec) -> dict[str, str]:
    """The lists of the body by name, as JSON without the brackets; of roots the whole body."""
    if spec.commits_roots:
        return {"body": rows[0].body}
    nonces = [nonce for row in rows for nonce in results.integers(row.nonces)]
    if spec.target is not None:
        distances = [distance for row in rows for distance in results.floats(row.found)]
        return {"nonces": _dumps(nonces)[1:-1], "dist": _dumps(distances)[1:-1]}
    found = results.vectors(b"".join(row.found for row in rows), rows[0].row_bytes)
    texts = vector_texts.encode_all(found)
    pairs = zip(nonces, texts, strict=True)
    # By hand: the same as the JSON of artifact_record, in a third of its time.
    return {
        "artifacts": ",".join(f'{{"nonce":{nonce},"vector_b64":"{text}"}}' for nonce, text in pairs)
    }


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
