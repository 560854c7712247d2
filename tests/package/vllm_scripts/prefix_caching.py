"""What vLLM's examples/offline_inference/prefix_caching.py does: prompts with a common beginning give the same texts
whether or not its rows are reused."""

import sys

from draftwood import LLM, SamplingParams

MODEL = sys.argv[1]

prefix = "You are an expert school principal, skilled in effectively managing faculty and staff. Draft questions for "
prompts = ["a potential first grade Head Teacher at an", "an interview of a", "the parents of a", "a letter to the"]
generating_prompts = [prefix + prompt for prompt in prompts]
sampling_params = SamplingParams(temperature=0.0)


def main() -> None:
    regular_llm = LLM(model=MODEL)
    print("Results without `enable_prefix_caching`")
    regular_generated_texts = []
    for one in generating_prompts:
        for output in regular_llm.generate(one, sampling_params):
            generated_text = output.outputs[0].text
            regular_generated_texts.append(generated_text)
            print(f"Prompt: {output.prompt!r}, Generated text: {generated_text!r}")
    print("-" * 80)
    outputs = regular_llm.generate(generating_prompts, sampling_params)
    print("Results with `enable_prefix_caching`")
    cached_generated_texts = []
    for output in outputs:
        generated_text = output.outputs[0].text
        cached_generated_texts.append(generated_text)
        print(f"Prompt: {output.prompt!r}, Generated text: {generated_text!r}")
    print("-" * 80)
    generated_same = all(
        regular_generated_texts[i] == cached_generated_texts[i] for i in range(len(generating_prompts))
    )
    print(f"Generated answers are the same: {generated_same}")


if __name__ == "__main__":
    main()
