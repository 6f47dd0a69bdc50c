"""The list of all checks, the most valuable first: where a machine is lent for minutes, the first ones are done."""

from __future__ import annotations

from benchmarks.gpu_bench.check import Check

CHECKS = (
    Check(
        name="machine",
        part="machine",
        function="machine.check_machine",
        about="card, versions, and the speed of a bare copy and a bare product",
        deadline_s=60,
    ),
    Check(
        name="attention",
        part="trainer",
        function="kernels.check_attention",
        about="packed flash attention against buckets and float64: outputs, gradients, windows, grouped heads",
        deadline_s=50,
    ),
    Check(
        name="head",
        part="trainer",
        function="kernels.check_head",
        about="log-probs in chunks against float64, gradients, peak memory against its bound",
        deadline_s=40,
    ),
    Check(
        name="step",
        part="trainer",
        function="training.check_step",
        about="a whole step of several objectives: bfloat16 against float32, equal runs, host syncs, kernels",
        deadline_s=70,
    ),
    Check(
        name="families",
        part="trainer",
        function="families.check_families",
        about="log-probs of Llama, Qwen2, Qwen3, GPT-NeoX, GPT-2 per dtype against float64 on the CPU",
        deadline_s=50,
    ),
    Check(
        name="torch_engine",
        part="searcher",
        function="weight_path.check_torch_engine",
        about="the embedded engine: generation, update in flight, digest and canary per dtype, tokens/s",
        deadline_s=120,
    ),
    Check(
        name="vllm",
        part="searcher",
        function="vllm_engine.check_vllm",
        about="vLLM with CUDA graphs: four families, updates in flight, all log-probs against the trainer's, per dtype",
        deadline_s=120,
    ),
    Check(
        name="vllm_bench",
        part="searcher",
        function="vllm_engine.check_vllm_bench",
        about="vLLM: tokens/s at 64 and 256 slots, the pause of an update, and the time from file to first token",
        kinds=("bench",),
        deadline_s=150,
    ),
    Check(
        name="fsdp",
        part="trainer",
        function="teams.check_fsdp",
        about="FSDP2 on every card there is (one, too): parity with the whole model, exact resume",
        deadline_s=70,
    ),
    Check(
        name="compile",
        part="trainer",
        function="training.check_compile",
        about="trainer.compile: parity, programs compiled, seconds of the first step, gain",
        deadline_s=130,
    ),
    Check(
        name="weight_path",
        part="weights",
        function="weight_path.check_weight_path",
        about="snapshot from the device, delta of a real step, staging, pause against a bare copy, digests",
        deadline_s=100,
    ),
    Check(
        name="run",
        part="run",
        function="runs.check_quickstart",
        about="a whole short `tba run` of the quickstart with trainer and searcher on the device",
        deadline_s=150,
    ),
    Check(
        name="run_vllm",
        part="run",
        function="runs.check_quickstart_vllm",
        about="the same with vLLM, which shares the card with the trainer",
        deadline_s=260,
    ),
    Check(
        name="memory",
        part="trainer",
        function="costs.check_memory",
        about="measured peak of a step against the traced one of `tba sizing`",
        kinds=("bench",),
        deadline_s=100,
    ),
    Check(
        name="throughput",
        part="trainer",
        function="costs.check_throughput",
        about="tokens/s and MFU at several lengths, with and without recomputation and compile",
        kinds=("bench",),
        deadline_s=170,
    ),
)
