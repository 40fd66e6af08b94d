"""An agent program as one writes it with the package `openai` alone; it finds address and key by itself."""

import openai

from hacpo_mega.conversations import AgentProgram


class Shopper(AgentProgram):
    """Says the task, then the length of the answer, then another task anew, and rewards low digits."""

    def reset(self, prompt, **row):
        self._prompt, self._said = prompt, ""

    def play(self, base_url, api_key):
        client = openai.OpenAI()
        messages = [{"role": "user", "content": self._prompt}]
        for _ in range(2):
            message = client.chat.completions.create(model="shop", messages=messages).choices[0].message
            self._said += message.content
            messages += [message, {"role": "user", "content": str(len(message.content))}]
        messages = [{"role": "user", "content": f"{len(self._said)}{self._prompt}"}]
        self._said += client.chat.completions.create(model="shop", messages=messages).choices[0].message.content

    def get_reward(self):
        return sum(map(self._said.count, "01234")) / max(1, len(self._said))
