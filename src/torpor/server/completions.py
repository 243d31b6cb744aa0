"""``POST /v1/completions``: prompts to jobs, deltas to OpenAI's shapes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from torpor.engine.frontend import TextDelta
from torpor.request import TokenLogprobs
from torpor.server.context import ServerContext
from torpor.server.generation import Choice, Tally, finish_word, now, run_jobs
from torpor.server.logprobs import CompletionLogprobsBuilder
from torpor.server.replies import Completion, CompletionChoice, CompletionLogprobs, Reply
from torpor.server.sampling import Job, check_stream_options, completion_sampling
from torpor.server.wire import CompletionBody

ROUTE = "completions"


class CompletionAnswer:
    """One request being answered. Building it does all checks that need no engine; use ``whole`` or ``chunks``, once."""

    def __init__(self, context: ServerContext, body: CompletionBody) -> None:
        self._context = context
        self._body = body
        self._model = context.check_model(body.model)
        check_stream_options(body)
        self._id = context.new_id("cmpl")
        self._created = now()
        self._n = body.n or 1
        self._jobs = self._make_jobs()
        self._echoes = self._make_echoes()
        self._builders: dict[int, CompletionLogprobsBuilder] = {}
        self._tally = Tally(self._n)

    def _make_jobs(self) -> list[Job]:
        body, frontend = self._body, self._context.frontend
        sampling = completion_sampling(body)
        jobs = []
        for i, prompt in enumerate(body.prompts):
            ids = frontend.encode(prompt) if isinstance(prompt, str) else prompt
            jobs.append(
                Job(
                    request_id=f"{self._id}-{i}",
                    prompt_token_ids=ids,
                    sampling=sampling,
                    n=self._n,
                    first_index=i * self._n,
                    kv_transfer_params=body.transfer_params,
                )
            )
        return jobs

    def _make_echoes(self) -> list[str]:
        if not self._body.echo:
            return [""] * len(self._jobs)
        prompts = self._body.prompts
        return [p if isinstance(p, str) else self._context.frontend.decode(p) for p in prompts]

    def _deltas(self) -> AsyncGenerator[TextDelta, None]:
        return run_jobs(self._context.frontend, self._jobs, self._context.metrics.meter(ROUTE, self._n))

    def _echo_of(self, index: int) -> str:
        return self._echoes[index // self._n]

    async def whole(self) -> Reply:
        choices = [Choice(i, text=self._echo_of(i)) for i in range(self._n * len(self._jobs))]
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                choices[delta.index].add(delta)
                self._tally.add(delta)
        return self._reply([self._whole_choice(c) for c in choices], self._last_fields(with_usage=True))

    def _whole_choice(self, choice: Choice) -> CompletionChoice:
        logprobs = self._logprobs(choice.index, choice.logprobs) if self._body.logprobs is not None else None
        return self._choice(choice.index, choice.text, logprobs, choice, choice.token_ids, first=True)

    async def chunks(self) -> AsyncGenerator[Reply, None]:
        started: set[int] = set()
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                self._tally.add(delta)
                first = delta.index not in started
                started.add(delta.index)
                yield self._reply([self._chunk_choice(delta, first)], self._chunk_fields(delta))
        if self._body.include_usage:
            yield self._reply([], {"usage": self._tally.usage})

    def _chunk_choice(self, delta: TextDelta, first: bool) -> CompletionChoice:
        text = (self._echo_of(delta.index) if first else "") + delta.text
        wanted = self._body.logprobs is not None and delta.logprobs
        logprobs = self._logprobs(delta.index, delta.logprobs or []) if wanted else None
        return self._choice(delta.index, text, logprobs, delta, delta.token_ids, first=first)

    def _logprobs(self, index: int, positions: list[TokenLogprobs]) -> CompletionLogprobs:
        """Only of what the engine has taken: other token ids may be none of the vocabulary."""
        if index not in self._builders:
            job, frontend = self._jobs[index // self._n], self._context.frontend
            hides = job.sampling.skip_special_tokens
            self._builders[index] = CompletionLogprobsBuilder(frontend, job.prompt_token_ids, hides_special=hides)
        return self._builders[index].build(positions)

    def _chunk_fields(self, delta: TextDelta) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._body.include_usage:
            fields["usage"] = self._tally.usage if self._body.continuous_usage else None
        if delta.kv_transfer_params is not None:
            fields["kv_transfer_params"] = delta.kv_transfer_params
        return fields

    def _last_fields(self, with_usage: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {"usage": self._tally.usage} if with_usage else {}
        if self._tally.kv_transfer_params is not None:
            fields["kv_transfer_params"] = self._tally.kv_transfer_params
        return fields

    def _choice(
        self,
        index: int,
        text: str,
        logprobs: CompletionLogprobs | None,
        end: Choice | TextDelta,
        token_ids: list[int],
        *,
        first: bool,
    ) -> CompletionChoice:
        extra: dict[str, Any] = {}
        if self._body.return_token_ids:
            extra["token_ids"] = token_ids
            if first:
                extra["prompt_token_ids"] = self._jobs[index // self._n].prompt_token_ids
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=finish_word(end.finish_reason),
            stop_reason=end.stop_reason,
            **extra,
        )

    def _reply(self, choices: list[CompletionChoice], fields: dict[str, Any]) -> Completion:
        return Completion(
            id=self._id, object="text_completion", created=self._created, model=self._model, choices=choices, **fields
        )
