"""An engine whose turns are written by a test, for players of conversations."""

import numpy as np

from hacpo_mega.records import Completion, Stop
from hacpo_mega.rollout.vllm.engine_loop import TurnLimits

SIGNS = tuple("0123456789+-*=,;s?")


class Written:
    """An engine that gives turns by what they read: `script(text read) -> (text, stop)`. It notes the requests."""

    def __init__(self, codec, script):
        self.codec, self.script, self.asked, self.error = codec, script, [], None
        self.turn_limits, self.eos_ids = TurnLimits(len(codec.tokenizer), 1100), codec.ends.ids

    def serve(self, source):
        while not source.is_done:
            requests, _ = source.take(True)
            for request in requests:
                self.asked.append(request)
                if self.error is not None:
                    source.fail(self.error)
                    raise self.error
                text, stop = self.script(self.codec.decode_answer(request.prompt_ids))
                ids = np.array(self.codec.encode_answer(text, stop is Stop.EOS), dtype=np.int32)[: request.max_tokens]
                logprobs = np.linspace(-1, -2, len(ids), dtype=np.float32)
                source.give(request.key, Completion(ids, stop, logprobs))
