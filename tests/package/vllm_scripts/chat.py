"""What vLLM's examples/offline_inference/basic/chat.py does: one conversation, and then a list of them."""

import sys
from collections.abc import Sequence

from draftwood import LLM, RequestOutput, SamplingParams

MODEL = sys.argv[1]


def print_outputs(outputs: Sequence[RequestOutput]) -> None:
    print("\nGenerated Outputs:\n" + "-" * 80)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}\n")
        print(f"Generated text: {generated_text!r}")
        print("-" * 80)


def main() -> None:
    sampling_params = SamplingParams(max_tokens=8, temperature=0.0, top_p=1.0, top_k=-1)
    llm = LLM(model=MODEL)
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I assist you today?"},
        {"role": "user", "content": "Write an essay about the importance of higher education."},
    ]
    outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
    print_outputs(outputs)
    conversations = [conversation for _ in range(10)]
    outputs = llm.chat(conversations, sampling_params, use_tqdm=True)
    print_outputs(outputs)


if __name__ == "__main__":
    main()
