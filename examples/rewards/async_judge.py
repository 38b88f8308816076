"""An async reward: asks a judge model on any server with OpenAI's chat API.

    mtrl train run.yaml worker.reward.reward_fn_path=examples/rewards/async_judge.py \
        worker.reward.reward_fn_kwargs='{url: "http://localhost:8000/v1", model: judge}'

Responses that reach a worker together are judged concurrently; worker.reward.timeout_s applies to each of them.
"""

import asyncio
import json
import re
import urllib.request

QUESTION = """Question: {prompt}
Right answer: {truth}
Response: {response}
How good is the response, from 0 to 10? Reply with the number alone."""


async def reward_function(data, url, model="judge"):
    question = QUESTION.format(prompt=data["prompt"], truth=data["ground_truth"], response=data["response"])
    reply = await asyncio.to_thread(ask, f"{url}/chat/completions", model, question)
    number = re.search(r"\d+(\.\d+)?", reply)
    if number is None:
        return None  # no score from the judge: left out of the total
    return min(float(number[0]), 10.0) / 10


def ask(url, model, question):
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0})
    request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]
