"""``POST /v1/chat/completions``: a conversation to one job, deltas to OpenAI's shapes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from torpor.engine.frontend import TextDelta
from torpor.errors import RequestError
from torpor.server.context import ServerContext
from torpor.server.generation import Choice, Tally, finish_word, now, run_jobs
from torpor.server.logprobs import chat_logprobs
from torpor.server.replies import Chat, ChatChoice, ChatChunk, ChatChunkChoice, ChatDelta, ChatMessage, Reply
from torpor.server.sampling import Job, chat_sampling, check_stream_options
from torpor.server.wire import ChatBody

ROUTE = "chat"
NOT_VARIABLES = (
    "chat_template",
    "conversation",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
)


class ChatAnswer:
    """One request being answered. Building it does all checks that need no engine; use ``whole`` or ``chunks``, once."""

    def __init__(self, context: ServerContext, body: ChatBody) -> None:
        self._context = context
        self._body = body
        self._model = context.check_model(body.model)
        check_stream_options(body)
        self._id = context.new_id("chatcmpl")
        self._created = now()
        self._n = body.n or 1
        self._job = self._make_job()
        self._tally = Tally(self._n)

    def _make_job(self) -> Job:
        body, frontend = self._body, self._context.frontend
        check_template_kwargs(body.chat_template_kwargs)
        messages = [m.for_template() for m in body.messages]
        ids = frontend.encode_chat(messages, body.chat_template_kwargs)
        return Job(
            request_id=self._id,
            prompt_token_ids=ids,
            sampling=chat_sampling(body, len(ids), frontend.info.max_model_len),
            n=self._n,
            first_index=0,
            kv_transfer_params=body.transfer_params,
            param="messages",
        )

    def _deltas(self) -> AsyncGenerator[TextDelta, None]:
        return run_jobs(self._context.frontend, [self._job], self._context.metrics.meter(ROUTE, self._n))

    async def whole(self) -> Reply:
        choices = [Choice(i) for i in range(self._n)]
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                choices[delta.index].add(delta)
                self._tally.add(delta)
        return Chat(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            choices=[self._whole_choice(c) for c in choices],
            usage=self._tally.usage,
            **self._prompt_ids(),
            **self._hand_off(self._tally.kv_transfer_params),
        )

    def _whole_choice(self, choice: Choice) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=ChatMessage(role="assistant", content=choice.text, refusal=None),
            logprobs=chat_logprobs(self._context.frontend, choice.logprobs) if self._body.logprobs else None,
            finish_reason=finish_word(choice.finish_reason),
            stop_reason=choice.stop_reason,
            **self._token_ids(choice.token_ids),
        )

    async def chunks(self) -> AsyncGenerator[Reply, None]:
        """The role first, then content, then the reason of the end, which is a chunk of its own, as OpenAI sends it."""
        started: set[int] = set()
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                self._tally.add(delta)
                if delta.index not in started:
                    more = {} if started else self._prompt_ids()
                    started.add(delta.index)
                    yield self._chunk([_choice(delta.index, ChatDelta(role="assistant", content=""))], **more)
                if delta.text or delta.token_ids:
                    yield self._chunk([self._content(delta)])
                if delta.finish_reason is not None:
                    yield self._chunk([_end(delta)], **self._hand_off(delta.kv_transfer_params))
        if self._body.include_usage:
            yield self._chunk([], usage=self._tally.usage)

    def _content(self, delta: TextDelta) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=delta.index,
            delta=ChatDelta(content=delta.text),
            logprobs=chat_logprobs(self._context.frontend, delta.logprobs) if self._body.logprobs and delta.logprobs else None,
            finish_reason=None,
            **self._token_ids(delta.token_ids),
        )

    def _chunk(self, choices: list[ChatChunkChoice], **fields: Any) -> ChatChunk:
        if self._body.include_usage and "usage" not in fields:
            fields["usage"] = self._tally.usage if self._body.continuous_usage else None
        return ChatChunk(
            id=self._id, object="chat.completion.chunk", created=self._created, model=self._model, choices=choices, **fields
        )

    def _token_ids(self, ids: list[int]) -> dict[str, Any]:
        return {"token_ids": ids} if self._body.return_token_ids else {}

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._job.prompt_token_ids} if self._body.return_token_ids else {}

    @staticmethod
    def _hand_off(params: dict[str, Any] | None) -> dict[str, Any]:
        return {"kv_transfer_params": params} if params is not None else {}


def check_template_kwargs(given: dict[str, Any] | None) -> None:
    """RequestError for what is no variable of the template: above all a template of the client's own, which is a program."""
    for name in given or ():
        if name in NOT_VARIABLES:
            raise RequestError(f"chat_template_kwargs must not set {name!r}", param="chat_template_kwargs")


def _choice(index: int, delta: ChatDelta) -> ChatChunkChoice:
    return ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)


def _end(delta: TextDelta) -> ChatChunkChoice:
    return ChatChunkChoice(
        index=delta.index,
        delta=ChatDelta(),
        logprobs=None,
        finish_reason=finish_word(delta.finish_reason),
        stop_reason=delta.stop_reason,
    )
