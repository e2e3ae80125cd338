"""What benchmarks/gpu.py runs: real torch models with ballast, a job that needs the GPU, and a model that is parked."""

from __future__ import annotations

import os

from ostler import Job, Ostler

app = Ostler()
BIG_GIB = float(os.environ.get("GPU_BIG_GIB", "40"))
PARKED_GIB = float(os.environ.get("GPU_PARKED_GIB", "8"))
GIB_MB = 1073.741824
CONTEXT_MB = 1500  # CUDA's own, the libraries' and the activations


class Net:
    """A transformer encoder, and ballast up to a size. Its answer is the bits of a sum, so that nothing can be nearly right."""

    gib = BIG_GIB

    def load(self, model_id: str) -> None:
        import torch

        torch.manual_seed(int(model_id[-1]))
        layer = torch.nn.TransformerEncoderLayer(2048, 16, 8192, batch_first=True, norm_first=True)
        self.net = torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False).half().cuda().eval()
        used = torch.cuda.memory_allocated()
        count = int(self.gib * 2**30 - used) // 2
        self.ballast = torch.empty(count, dtype=torch.half, device="cuda")
        step = 1 << 28
        for at in range(0, count, step):  # every page is really used, and says which model's it is
            self.ballast[at : at + step].fill_(int(model_id[-1]) + 1)
        torch.cuda.synchronize()

    def infer(self, payload: dict) -> dict:
        import torch

        generator = torch.Generator(device="cuda").manual_seed(int(payload["seed"]))
        x = torch.randn(4, 256, 2048, generator=generator, device="cuda", dtype=torch.half)
        with torch.inference_mode():
            y = self.net(x).double().sum()
            heavy = self.ballast[:: 1 << 20].double().sum()
        return {"bits": float(y + heavy).hex(), "pid": os.getpid()}


@app.model(
    "big",
    models=[f"m{n}" for n in range(6)],
    gpu_mb=BIG_GIB * GIB_MB + CONTEXT_MB,
    idle=600,
    startup=180,
    timeout=180,
    queue=300,
)
class Big(Net): ...


@app.model("parks", models=["p0", "p1"], gpu_mb=PARKED_GIB * GIB_MB + CONTEXT_MB, idle=600, startup=180, park=True)
class Parks(Net):
    gib = PARKED_GIB


@app.job(queue="onto-gpu", gpu_mb=12_000, timeout=300)
def multiply(job: Job, n: int) -> float:
    """Ten GiB and a product, beside the models."""
    import torch

    held = torch.full((5 * 2**30,), 1, dtype=torch.half, device="cuda")
    x = torch.full((4096, 4096), n, dtype=torch.half, device="cuda")
    found = float((x @ x.T)[0, 0]) + float(held[0])
    del held, x
    torch.cuda.empty_cache()
    return found


app.pool("onto-gpu", workers=1)
