"""Generate JSON that follows a schema, whatever the model would like to write.

python examples/structured.py [BUNDLE]
"""

import json
import sys

from draftwood import LLM, SamplingParams, SpeculativeConfig, StructuredOutput

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 12},
        "kind": {"enum": ["function", "class", "module"]},
        "lines": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "kind", "lines"],
    "additionalProperties": False,
}

bundle = sys.argv[1] if len(sys.argv) > 1 else "bundles/smollm2"
params = SamplingParams(max_tokens=96, temperature=0.7, seed=1, structured=StructuredOutput(json=SCHEMA))

always = SpeculativeConfig(budget="fixed")  # by default only where it pays, which is rarely so with a tiny target
with LLM(bundle, always) as llm:
    (result,) = llm.generate(["A description of quicksort as JSON: "], params)

content = json.loads(result.text)
print(content["name"], content["kind"], content["lines"])
print(f"{result.stats.num_accepted_tokens} proposed tokens were accepted, all of them allowed by the schema")
