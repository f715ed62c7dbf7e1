"""Plays a workload against a server."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from serve.bench.client import CompletionClient, Messages
from serve.bench.metrics import RequestRecord, make_record
from serve.bench.options import Endpoint
from serve.bench.prompts import Prompt
from serve.bench.workload import Conversation


async def play(
    client: CompletionClient,
    conversations: Sequence[Conversation],
    endpoint: Endpoint,
    concurrency: int | None,
    on_done: Callable[[RequestRecord], None],
) -> list[RequestRecord]:
    """Run all conversations, each when it is due and at most `concurrency` at once; records by conversation and turn.

    First bodies are encoded beforehand, so that this costs no time while the server is at work.
    """
    histories = [_history(endpoint) for _ in conversations]
    bodies = [
        client.body(history.ask(conversation.turns[0].prompt), conversation.turns[0].output_len)
        for history, conversation in zip(histories, conversations, strict=True)
    ]
    gate: AbstractAsyncContextManager[object] = asyncio.Semaphore(concurrency) if concurrency else nullcontext()
    begin = asyncio.get_running_loop().time()

    async def run(index: int) -> list[RequestRecord]:
        await asyncio.sleep(begin + conversations[index].offset - asyncio.get_running_loop().time())
        async with gate:
            return await _converse(client, index, conversations[index], histories[index], bodies[index], on_done)

    results = await asyncio.gather(*(run(index) for index in range(len(conversations))))
    return [record for records in results for record in records]


async def _converse(
    client: CompletionClient,
    index: int,
    conversation: Conversation,
    history: "History",
    body: bytes,
    on_done: Callable[[RequestRecord], None],
) -> list[RequestRecord]:
    """All turns of one conversation; a failed turn ends it, for there is no answer to go on from."""
    records: list[RequestRecord] = []
    expected_input = 0
    for number, turn in enumerate(conversation.turns):
        if number > 0:
            body = client.body(history.ask(turn.prompt), turn.output_len)
        expected_input += turn.input_len
        answer = await client.complete(body)
        record = make_record(answer, index, number, expected_input, turn.output_len)
        records.append(record)
        on_done(record)
        if record.failure is not None:
            break
        history.answer(answer.text)
        expected_input += record.output_tokens
    return records


class History:
    """A conversation as a completion prompt: questions and answers one after another."""

    def __init__(self) -> None:
        self._prompt: Prompt | None = None

    def ask(self, question: Prompt) -> Prompt | Messages:
        """What to send for the next question."""
        if self._prompt is None:
            self._prompt = question
        elif isinstance(self._prompt, str) and isinstance(question, str):
            self._prompt += question
        else:
            raise TypeError("only text prompts have more than one turn")
        return self._prompt

    def answer(self, text: str) -> None:
        """Keep the server's answer."""
        if isinstance(self._prompt, str):
            self._prompt += text


class ChatHistory(History):
    """A conversation as chat messages."""

    def __init__(self) -> None:
        super().__init__()
        self._messages: Messages = []

    def ask(self, question: Prompt) -> Prompt | Messages:
        if not isinstance(question, str):
            raise TypeError("chat messages are text")
        self._messages.append({"role": "user", "content": question})
        return list(self._messages)

    def answer(self, text: str) -> None:
        self._messages.append({"role": "assistant", "content": text})


def _history(endpoint: Endpoint) -> History:
    return ChatHistory() if endpoint is Endpoint.CHAT else History()
