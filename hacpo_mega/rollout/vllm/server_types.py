"""Answers of the HTTP endpoint (conversations/endpoint.py) in the types of vLLM's own server.

Chat answers are OpenAI's shapes with vLLM's fields for token ids. Log-probs name a token `token_id:N`, also where
vLLM's type has the number alone: renderers, with which verifiers trains, accepts nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    FunctionCall,
    ToolCall,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionLogProbs,
    ChatCompletionLogProbsContent,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    ChatMessage,
)
from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
    GenerateLogProbs,
    GenerateLogProbsContent,
    GenerateTokensChoice,
    GenerateTokensResponse,
)
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse, ModelCard, ModelList, UsageInfo

from hacpo_mega.records import Completion, Stop

Json = dict[str, Any]


@dataclass(frozen=True)
class ServedTurn:
    """A turn that has ended: its name, its prompt and what was sampled."""

    name: str
    model: str
    prompt_ids: tuple[int, ...]
    completion: Completion

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for the end of a turn without a tool call."""
        return "stop" if self.completion.stop is Stop.EOS else "length"

    @property
    def token_ids(self) -> list[int]:
        return self.completion.token_ids.tolist()

    @property
    def usage(self) -> UsageInfo:
        read, written = len(self.prompt_ids), len(self.completion.token_ids)
        return UsageInfo(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)

    def generate_response(self) -> Json:
        """The answer of POST /inference/v1/generate."""
        sampled = zip(self.token_ids, self.completion.logprobs.tolist(), strict=True)
        content = [GenerateLogProbsContent(token_id=token, logprob=logprob) for token, logprob in sampled]
        choice = GenerateTokensChoice(
            index=0,
            finish_reason=self.finish_reason,
            token_ids=self.token_ids,
            logprobs=GenerateLogProbs(content=content),
        )
        answer = GenerateTokensResponse(
            request_id=self.name,
            model=self.model,
            choices=[choice],
            prompt_token_ids=list(self.prompt_ids),
            usage=self.usage,
        ).model_dump(exclude_none=True)
        for entry in answer["choices"][0]["logprobs"]["content"]:
            entry["token"] = f"token_id:{entry['token_id']}"
        return answer

    def chat_response(self, message: Mapping[str, Any], *, has_logprobs: bool) -> Json:
        """The answer of POST /v1/chat/completions; `message` is as ParsedTurn.message, arguments as text."""
        calls = [
            ToolCall(id=call["id"], function=FunctionCall(**call["function"])) for call in message.get("tool_calls", ())
        ]
        reply = ChatMessage(**_message_fields(message), tool_calls=calls)
        choice = ChatCompletionResponseChoice(
            index=0,
            message=reply,
            finish_reason=self._chat_reason(message),
            token_ids=self.token_ids,
            logprobs=self._chat_logprobs() if has_logprobs else None,
        )
        return ChatCompletionResponse(
            id=self.name,
            model=self.model,
            choices=[choice],
            usage=self.usage,
            prompt_token_ids=list(self.prompt_ids),
        ).model_dump(exclude_none=True)

    def chat_chunks(self, message: Mapping[str, Any], *, has_logprobs: bool, has_usage: bool) -> list[Json]:
        """The same as the chunks of a stream: message, finish reason, and usage if `has_usage`."""
        calls = [
            DeltaToolCall(index=n, id=call["id"], type="function", function=DeltaFunctionCall(**call["function"]))
            for n, call in enumerate(message.get("tool_calls", ()))
        ]
        reply = DeltaMessage(**_message_fields(message), tool_calls=calls)
        logprobs = self._chat_logprobs() if has_logprobs else None
        first = ChatCompletionResponseStreamChoice(index=0, delta=reply, token_ids=self.token_ids, logprobs=logprobs)
        last = ChatCompletionResponseStreamChoice(
            index=0, delta=DeltaMessage(), finish_reason=self._chat_reason(message)
        )
        chunks = [
            ChatCompletionStreamResponse(
                id=self.name, model=self.model, choices=[first], prompt_token_ids=list(self.prompt_ids)
            ),
            ChatCompletionStreamResponse(id=self.name, model=self.model, choices=[last]),
        ]
        if has_usage:
            chunks.append(ChatCompletionStreamResponse(id=self.name, model=self.model, choices=[], usage=self.usage))
        return [chunk.model_dump(exclude_none=True) for chunk in chunks]

    def _chat_reason(self, message: Mapping[str, Any]) -> str:
        is_call = bool(message.get("tool_calls")) and self.completion.stop is Stop.EOS
        return "tool_calls" if is_call else self.finish_reason

    def _chat_logprobs(self) -> ChatCompletionLogProbs:
        sampled = zip(self.token_ids, self.completion.logprobs.tolist(), strict=True)
        return ChatCompletionLogProbs(
            content=[ChatCompletionLogProbsContent(token=f"token_id:{t}", logprob=logprob) for t, logprob in sampled]
        )


def _message_fields(message: Mapping[str, Any]) -> Json:
    """An assistant's message without its calls, in fields of vLLM's."""
    return {"role": "assistant", "content": message["content"], "reasoning": message.get("reasoning_content")}


def model_list(name: str, max_model_len: int) -> Json:
    """The answer of GET /v1/models."""
    card = ModelCard(id=name, max_model_len=max_model_len, owned_by="hacpo_mega")
    return ModelList(data=[card]).model_dump(exclude_none=True)


def error_answer(message: str, kind: str, code: int) -> Json:
    """The body of a refusal."""
    return ErrorResponse(error=ErrorInfo(message=message, type=kind, code=code)).model_dump(exclude_none=True)
