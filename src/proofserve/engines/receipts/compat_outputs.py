"""vLLM's private names in the API process: what only it knows about requests that end."""

from collections import OrderedDict
from typing import Any

# Requests of which something is remembered; the oldest go first, as their answers never came.
MOST_REQUESTS = 16_384


class RequestNotes:
    """Remembers of an engine client's requests what the engine core cannot know.

    A stop string ends an answer in the API process; the core sees a request that was aborted, and
    may be a token or two ahead. Of a request for several answers the core sees requests that know
    nothing of each other.

    Relies on: AsyncLLM.output_processor, and its add_request(request, prompt, parent_req, ...) and
    process_outputs(outputs, ...).reqs_to_abort being looked up on it; its request_states, and
    their detokenizer.num_output_tokens(); ParentRequest.n.
    """

    def __init__(self, engine_client: Any) -> None:
        self._stopped: OrderedDict[str, int] = OrderedDict()
        self._siblings: OrderedDict[str, int] = OrderedDict()
        processor = engine_client.output_processor
        add, process = processor.add_request, processor.process_outputs
        requests = processor.request_states

        def add_request(
            request: Any, prompt: Any, parent_req: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            if parent_req is not None:
                self._siblings[request.request_id] = parent_req.n
                _limit(self._siblings)
            return add(request, prompt, parent_req, *args, **kwargs)

        def process_outputs(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            # The processor forgets a request as soon as it has ended.
            states = {each.request_id: requests.get(each.request_id) for each in outputs}
            processed = process(outputs, *args, **kwargs)
            for request_id in processed.reqs_to_abort:
                self._stopped[request_id] = states[request_id].detokenizer.num_output_tokens()
            _limit(self._stopped)
            return processed

        processor.add_request, processor.process_outputs = add_request, process_outputs

    def take(self, request_id: str) -> tuple[int | None, int]:
        """After how many tokens a stop string ended the request, None if none did.

        Then how many answers it is one of.
        """
        return self._stopped.pop(request_id, None), self._siblings.pop(request_id, 1)


def _limit(kept: "OrderedDict[str, Any]") -> None:
    while len(kept) > MOST_REQUESTS:
        kept.popitem(last=False)
