"""Whether a request may wait for a permit: its key, its body, its model and its key's limits."""

from proofserve.gateway import failures
from proofserve.gateway.failures import Failure
from proofserve.gateway.limits.clients import Charge, Client
from proofserve.gateway.limits.request_body import RequestFields
from proofserve.gateway.relay.gateway import Gateway


def admit(
    gateway: Gateway, authorization: bytes, body: bytes | bytearray
) -> tuple[Client, Charge, RequestFields] | Failure:
    """The client, what is set aside of its budget, and what the body asks for; or a refusal."""
    client = gateway.clients.find(authorization)
    if client is None:
        return failures.UNAUTHORIZED
    try:
        fields = gateway.body_reader.read(body)
    except ValueError as error:
        return failures.INVALID_BODY.saying(str(error))
    if not gateway.fleet.knows(fields.model):
        return failures.UNKNOWN_MODEL.saying(f"No backend serves the model {fields.model!r:.200}.")
    charge = client.admit(fields, len(body))
    return charge if isinstance(charge, Failure) else (client, charge, fields)
