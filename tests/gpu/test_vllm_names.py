"""What the GPU tests and benchmarks ask of vLLM is what the installed vLLM has: flags, fields and methods. Needs no GPU.

vLLM is asked in its own environment, once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from vllm_environment import VLLM_PYTHON, environment

from gyre_sdk.trainer.config import EngineConfig
from gyre_sdk.trainer.engines import vllm
from gyre_sdk.trainer.weights import PolicyFiles

ROOT = Path(__file__).parents[2]
PROGRAM = """
import inspect, json, sys
from types import SimpleNamespace
from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from gyre_sdk.trainer.engines import vllm, vllm_worker
from gyre_sdk.trainer.transports import nccl

asked = json.load(sys.stdin)
unknown = []
for words in asked["commands"]:
    unknown += make_arg_parser(FlexibleArgumentParser()).parse_known_args(words)[1]

info = NCCLTrainerInitInfo(rank=0, master_address="host", master_port=1, world_size=2)
inspect.signature(WeightTransferTrainerFactory.trainer_init).bind(info, client=None, source=None)

class Posts:
    def __getattr__(self, name):
        return lambda *given, **named: sent.append([name, *map(str, given)])

sent = []
client = nccl._Client(Posts())
client.label = "7"
wanted = [name for name, one in vars(VLLMWeightSyncClient).items() if inspect.isfunction(one) and name[0] != "_"]
client.init_weight_transfer_engine(init_info={"a": 1})
client.start_weight_update()
client.update_weights({"names": []})
client.finish_weight_update()

source = nccl._source()
source.files = [asked["file"]]
meta = [[one.name, str(one.dtype), list(one.shape)] for one in source.metadata()]
pairs = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in source._tensors("cpu")]

vllm.register()
engine = WeightTransferEngineFactory._registry[vllm.BACKEND]()
print(json.dumps({
    "unknown": unknown, "sent": sent, "meta": meta, "pairs": pairs, "engine": engine.__name__,
    "missing": [name for name in wanted if not hasattr(nccl._Client, name)],
    "abstract": sorted(engine.__abstractmethods__ | type(source).__abstractmethods__),
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What vLLM says."""
    with pytest.MonkeyPatch.context() as patch:  # other tests do not find the benchmarks' modules
        patch.syspath_prepend(ROOT / "benchmarks" / "gpu")
        import one_gpu
    place = tmp_path_factory.mktemp("names")
    save_file({"b": torch.ones(2, dtype=torch.bfloat16), "a": torch.zeros(3, 4)}, place / "model.safetensors")
    commands = []
    for name, rank in (("file", 0), ("lora", 8), ("nccl", 0)):
        shared = argparse.Namespace(engine="vllm", device="cuda", kv_gib=2.0, share=0.3, eager=True)
        options = [*one_gpu._engine_options(shared), *(["--skip-tokenizer-init"] if name != "lora" else [])]
        config = EngineConfig(kind="vllm", transport=name, options=options)
        command = vllm.command(config, PolicyFiles(0, place, ""), 1234, transport=name, rank=rank)
        commands.append(command[1:])
    asked = json.dumps({"commands": commands, "file": str(place / "model.safetensors")})
    done = subprocess.run(
        [str(VLLM_PYTHON), "-c", PROGRAM],
        input=asked,
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_every_flag_is_one_of_vllms(found: dict[str, object]) -> None:
    assert found["unknown"] == []


def test_the_client_says_what_vllms_trainer_asks_for(found: dict[str, object]) -> None:
    assert found["missing"] == []
    assert found["sent"] == [
        ["post", "/init_weight_transfer_engine", "{'init_info': {'a': 1}}"],
        ["start"],
        ["update", "{'names': []}"],
        ["finish", "7"],
    ]


def test_sources_and_engines_are_whole(found: dict[str, object]) -> None:
    assert found["abstract"] == [] and found["engine"] == "FileEngine"
    assert found["meta"] == found["pairs"]
    assert sorted(name for name, *_ in found["meta"]) == ["a", "b"]
