"""What one turn owes the HTTP processes."""

from serve.ipc.messages import OutputBatch, SlotReleased
from serve.router.outputs import Outputs
from serve.router.request import RequestKey
from serve.types import FinishReason
from unit_tests.serve.router.test_request import make_request


def test_one_batch_a_server_and_releases_after_outputs():
    outputs, sent = Outputs(), []
    first, second = make_request(slot=1), make_request(slot=2)
    second.server = 1
    outputs.add(first, [5])
    outputs.add(second, [6], FinishReason.LENGTH)
    outputs.add(first, [7])
    outputs.released(1, second.key)
    outputs.flush(lambda server, message: sent.append((server, message)))
    assert [(server, type(message)) for server, message in sent] == [
        (0, OutputBatch),
        (1, OutputBatch),
        (1, SlotReleased),
    ]
    assert [output.token_ids for output in sent[0][1].outputs] == [[5], [7]]
    outputs.flush(lambda server, message: sent.append((server, message)))
    assert len(sent) == 3


def test_only_the_first_output_tells_what_was_cached():
    outputs = Outputs()
    request = make_request()
    request.count_cached([32, 0, 0])
    assert outputs.add(request, [1]).cached_tokens == [32, 0, 0]
    assert outputs.add(request, [2]).cached_tokens is None


def test_a_refusal_is_a_last_output_with_a_code():
    outputs, sent = Outputs(), []
    outputs.refuse(0, RequestKey(3, 9), "too many requests are waiting", 429)
    outputs.flush(lambda server, message: sent.append(message))
    (output,) = sent[0].outputs
    assert (output.slot, output.generation, output.finish_reason) == (3, 9, FinishReason.ERROR)
    assert (output.error, output.error_code) == ("too many requests are waiting", 429)
