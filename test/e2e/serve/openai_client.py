"""Drives a running server with the openai client: python openai_client.py BASE_URL KEY open|keyed"""
import sys

import openai

base_url, key, mode = sys.argv[1:4]
client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=60.0)
question = [{"role": "user", "content": "What is the capital of France?"}]


def refused(error, call):
    try:
        call()
    except error as e:
        return e
    raise AssertionError(f"no {error.__name__}")


models = [m.id for m in client.models.list()]
assert len(models) == 1, models
assert client.models.retrieve(models[0]).id == models[0]

whole = client.chat.completions.create(model="any", messages=question, max_tokens=24, temperature=0, n=1, user="u")
assert "Paris" in whole.choices[0].message.content, whole
assert whole.model == models[0]
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
assert whole.usage.prompt_tokens_details.cached_tokens >= 0

text, usage, finish = "", None, None
for chunk in client.chat.completions.create(model="any", messages=question, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}):
    for choice in chunk.choices:
        text += choice.delta.content or ""
        finish = choice.finish_reason or finish
    usage = chunk.usage or usage
assert text == whole.choices[0].message.content, (text, whole)
assert finish == whole.choices[0].finish_reason
assert usage.completion_tokens == whole.usage.completion_tokens

entries = client.chat.completions.create(model="any", messages=question, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3).choices[0].logprobs.content
assert len(entries) == 6 and all(len(e.top_logprobs) == 3 and e.bytes for e in entries), entries

done = client.completions.create(model="any", prompt=["One, two,", "A, B,"], max_tokens=8, temperature=0, logprobs=2, extra_body={"ignore_eos": True})
assert [c.index for c in done.choices] == [0, 1]
assert all(len(c.logprobs.tokens) == 8 == len(c.logprobs.token_logprobs) for c in done.choices)
streamed = {0: "", 1: ""}
for chunk in client.completions.create(model="any", prompt=["One, two,", "A, B,"], max_tokens=8, temperature=0, stream=True, extra_body={"ignore_eos": True}):
    for choice in chunk.choices:
        streamed[choice.index] += choice.text
assert [streamed[0], streamed[1]] == [c.text for c in done.choices], (streamed, done)

error = refused(openai.BadRequestError, lambda: client.chat.completions.create(model="any", messages=[], max_tokens=1))
assert error.param == "messages", error.body
error = refused(openai.BadRequestError, lambda: client.completions.create(model="any", prompt="a " * 100_000, max_tokens=1))
assert error.code == "context_length_exceeded", error.body
refused(openai.NotFoundError, lambda: client.models.retrieve("no-such-model"))
if mode == "keyed":
    stranger = openai.OpenAI(base_url=base_url, api_key="LSK-wrong", max_retries=0, timeout=60.0)
    refused(openai.AuthenticationError, lambda: stranger.models.list())

with client.chat.completions.create(model="any", messages=question, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}) as stream:
    for _ in zip(range(3), stream):
        pass
assert "Paris" in client.chat.completions.create(model="any", messages=question, max_tokens=24, temperature=0).choices[0].message.content
print("all good")
