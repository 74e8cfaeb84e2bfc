"""Ways in which a value that an emulated GPU does not compute reaches the host: none of them gives a figure without a word."""

from __future__ import annotations

import ast
import textwrap

CAUGHT, DECIDED, READ, HARMLESS = "caught", "decided", "read", "harmless"
"""`unmeasured`, with its line; noted as a branch, which fails in strict mode; noted as a read; nothing, for the reason beside it."""

COMMON = """
import copy, ctypes, io, json, math, bisect, heapq, itertools, pickle, statistics, threading
import numpy as np
import safetensors.torch
import torch, torch.nn.functional as F
torch.manual_seed(0)
x = torch.randn(1000, 1000, device="cuda")
y = torch.randn(100, device="cuda") @ torch.randn(100, 100, device="cuda")  # small, and made of what is not known
known = torch.arange(8).cuda()
loss = x.square().mean()
score = x.sum(1)
expert = torch.nn.Linear(1000, 1000, device="cuda")
class Sub(torch.Tensor): pass
class Listing(torch.nn.Module):
    def forward(self, x):
        n: list[int] = x.tolist()
        return n
class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2
    @staticmethod
    def backward(ctx, gradient):
        if gradient.sum().item() > 0: gradient = gradient * 1
        return gradient
"""

# Integers, booleans, orders and sizes.
TABLE: list[tuple[str, str]] = [
    (CAUGHT, "x[x > 0]"),
    (CAUGHT, "x[x > 0] = torch.tensor(0.0, device='cuda')"),
    (CAUGHT, "x[x > 0] += 1"),
    (CAUGHT, "x[x > 0] = x[:, 0]"),
    (CAUGHT, "x[(x > 0).cpu()] = 0"),
    (CAUGHT, "x.index_put_((x > 0,), torch.tensor(1.0), accumulate=True)"),
    (CAUGHT, "torch.where(x > 0)"),
    (CAUGHT, "torch.linalg.matrix_exp(x[:8, :8])"),
    (CAUGHT, "if loss > 1: expert(x)"),
    (CAUGHT, "if (x > 0).any().cpu(): expert(x)"),
    (CAUGHT, "host = x.to('cpu') > 0\nif host.any(): expert(x)"),
    (CAUGHT, "int(float(x.sum()))"),
    (CAUGHT, "math.ceil(loss)"),
    (CAUGHT, "math.trunc(loss.item())"),
    (CAUGHT, "correct = (x.argmax(-1) == 1).sum().item()"),
    (CAUGHT, "torch.zeros(int(2 + loss.item() / 3), device='cuda')"),
    (CAUGHT, "divmod(loss.item(), 2)[0].__int__()"),
    (CAUGHT, "sorted(score[:8], key=float)"),
    (CAUGHT, "max(range(8), key=lambda i: score[i].item())"),
    (CAUGHT, "values = score[:8].tolist()\nvalues.index(values[3])"),
    (CAUGHT, "heapq.nlargest(2, score[:8].tolist())"),
    (CAUGHT, "if torch.allclose(x, x * 2): expert(x)"),
    (CAUGHT, "score.as_subclass(Sub).argsort().numpy(force=True)"),
    (CAUGHT, "torch.tensor([score.as_subclass(Sub).argmax(), score.as_subclass(Sub).argmin()]).max().item()"),
    (CAUGHT, "part = known.clone().as_subclass(Sub)\npart.copy_(score[:8].argsort())\npart.tolist()"),
    (CAUGHT, "if torch.is_nonzero(score.argmax()): expert(x)"),
    (CAUGHT, "complex(score.argmax())"),
    (CAUGHT, "score.argsort().numpy(force=True)"),
    (CAUGHT, "np.from_dlpack(score.argsort().cpu())"),
    (CAUGHT, "[1, 2, 3][score[:3].argmax()]"),
    (CAUGHT, "x[:score[:8].argmax()]"),
    (CAUGHT, "torch.zeros(score[:8].argmax(), device='cuda')"),
    (CAUGHT, "host = torch.empty(1000, dtype=torch.int64)\nhost.copy_(score.argsort())\nhost[0].item()"),
    (CAUGHT, "host = torch.empty(1000, dtype=torch.int64, pin_memory=True)\nhost.copy_(score.argsort(), non_blocking=True)\nhost.tolist()"),
    (CAUGHT, "host = torch.zeros(4, dtype=torch.int64)\nhost[1] = score.argmax()\nhost.sum().item()"),
    (CAUGHT, "torch.tensor([score.argmax(), score.argmin()]).max().item()"),
    (CAUGHT, "torch.tensor(score[:8].tolist(), device='cuda').argmax().item()"),
    (CAUGHT, "torch.full((4,), float(loss), device='cuda').nonzero()"),
    (CAUGHT, "torch.as_tensor(np.array([loss.item()])).nonzero()"),
    (CAUGHT, "torch.arange(loss.item(), device='cuda')"),
    (CAUGHT, "torch.arange(loss, device='cuda')"),
    (CAUGHT, "F.interpolate(x[None, None, :8, :8], scale_factor=loss.item())"),
    (CAUGHT, "x.masked_select(x > 0)"),
    (CAUGHT, "score.argsort().cpu().unique()"),
    (CAUGHT, "known.repeat_interleave(score[:8].argsort())"),
    (CAUGHT, "score.argsort().bincount()"),
    (CAUGHT, "x.tensor_split(score[:2].argsort().cpu())"),
    (CAUGHT, "torch.nn.utils.rnn.pack_padded_sequence(x[:, :, None], score.argsort().cpu(), enforce_sorted=False)"),
    (CAUGHT, "x.to_sparse()"),
    (CAUGHT, "torch.sparse_coo_tensor(score[:4].argsort()[None], score[:4], (8,)).coalesce()"),
    (CAUGHT, "with torch.inference_mode(): torch.argwhere(x)"),
    (CAUGHT, "with torch.inference_mode(): bool((x > 0).any())"),
    (CAUGHT, "part = y.long()\npart[0] = 1\npart.nonzero()"),
    (CAUGHT, "filled = torch.zeros(4, device='cuda')\nfilled.fill_(loss)\nfilled.nonzero()"),
    (CAUGHT, "copy.deepcopy(score.argsort().cpu()).tolist()"),
    (CAUGHT, "torch._nested_tensor_from_mask(x.view(1000, 500, 2), x[:, :500] > 0)"),
    (CAUGHT, "torch._nested_tensor_from_mask_left_aligned(torch.ones(8, 8, 2), (x[:8, :8] > 0).cpu())"),
    (CAUGHT, "layer = torch.nn.TransformerEncoderLayer(1000, 2, 16, batch_first=True)\nwith torch.no_grad(): torch.nn.TransformerEncoder(layer, 1).cuda().eval()(x[None], src_key_padding_mask=score[None] > 0)"),
    (CAUGHT, "@torch.jit.script\ndef listed(w):\n    n: list[int] = w.tolist()\n    return n\nlisted(score.argsort().cpu())"),
    (CAUGHT, "@torch.jit.script\ndef listed(w):\n    n: list[int] = w.tolist()\n    return n\n@torch.jit.script\ndef calling(w):\n    return listed(w.argsort())\ncalling(score)"),
    (CAUGHT, "file = io.BytesIO()\ntorch.jit.save(torch.jit.script(Listing()), file)\nfile.seek(0)\ntorch.jit.load(file)(score.argsort())"),
    (CAUGHT, "score.argsort().cpu().apply_(lambda one: one + 1)"),
    (CAUGHT, "torch.arange(8).map_(score[:8].argsort().cpu(), lambda one, other: one + other)"),
    (CAUGHT, "made = torch.zeros(8).map2_(torch.ones(8), score[:8].cpu(), lambda one, other, third: third)\nmade.nonzero()"),
    (CAUGHT, "pickle.loads(pickle.dumps(score.argsort())).tolist()"),
    (CAUGHT, "part = torch.arange(8).cuda()\nother = pickle.loads(pickle.dumps(part))\nother[score[:8] > 0] = 1\nother.nonzero()"),
    (CAUGHT, "torch.isin(1000, score.argsort())"),
    (CAUGHT, "torch.isin(score.argsort(), torch.arange(1000, device='cuda'))"),
    (CAUGHT, "with torch.inference_mode(): torch.isin(score.argsort(), score.argsort())"),
    (CAUGHT, "file = io.BytesIO()\ntorch.save(torch.nn.Parameter(score.argsort().cpu(), False), file)\nfile.seek(0)\ntorch.load(file).tolist()"),
    (CAUGHT, "file = io.BytesIO()\ntorch.save(score.argsort(), file, _use_new_zipfile_serialization=False)\nfile.seek(0)\ntorch.load(file, map_location='cpu').tolist()"),
    (CAUGHT, "score.argsort().cpu().share_memory_().tolist()"),
    (CAUGHT, "queue = torch.multiprocessing.SimpleQueue()\nqueue.put(score.argsort().cpu())\nqueue.get().tolist()"),
    (CAUGHT, "queue, order = torch.multiprocessing.SimpleQueue(), score.argsort().cpu()\nqueue.put(order)\norder.tolist()"),
    (CAUGHT, "data = torch.utils.data.TensorDataset(score.argsort().cpu())\nnext(iter(torch.utils.data.DataLoader(data, num_workers=1)))[0].tolist()"),
    (CAUGHT, "score.argsort().cpu().resize_(2000).tolist()"),
    (CAUGHT, "def read(): x.nonzero()\nthread = threading.Thread(target=read)\nthread.start()\nthread.join()"),
    (CAUGHT, "kept = []\nw = torch.ones(8, device='cuda', requires_grad=True)\nw.register_hook(lambda g: kept.append(g.argsort().cpu()))\n(w * 2).sum().backward()\nkept[0].tolist()"),
    # Python that autograd calls in backward.
    (CAUGHT, "w = torch.ones(8, device='cuda', requires_grad=True)\nw.register_hook(lambda g: g[g > 0].sum() * g)\n(w * 2).sum().backward()"),
    (CAUGHT, "w = torch.ones(8, device='cuda', requires_grad=True)\nw.register_hook(lambda g: g * len(torch.unique(g)))\n(w * 2).sum().backward()"),
    (CAUGHT, "w = torch.ones(8, device='cuda', requires_grad=True)\nw.register_hook(lambda g: g if torch.equal(g, w) else -g)\n(w * 2).sum().backward()"),
    (CAUGHT, "w = torch.ones(8, device='cuda', requires_grad=True)\nout = w * 2\nout.grad_fn.register_hook(lambda _, g: print(g[0].cpu().nonzero()))\n(out * 2).sum().backward()"),
    (CAUGHT, "layer = copy.deepcopy(expert)\nlayer.register_full_backward_hook(lambda _, given, made: print(made[0].cpu().nonzero()))\nlayer(x).square().sum().backward()"),
    (CAUGHT, "w = torch.ones(8, device='cuda', requires_grad=True)\nwith torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * len((t * y[:8]).cpu().nonzero())): out = w * w\nout.sum().backward()"),
    (CAUGHT, "w = torch.ones(8, device='cuda', requires_grad=True)\ntorch.utils.checkpoint.checkpoint(lambda x: x * len((x * y[:8]).cpu().nonzero()), w, use_reentrant=False).sum().backward()"),
    # What backward writes to, without an operator that is seen.
    (CAUGHT, "w, grads = torch.ones(8, device='cuda', requires_grad=True), torch.zeros(16, device='cuda')\nw.grad = grads[8:]\n(w * 2).sum().backward()\ngrads.nonzero()"),
    (CAUGHT, "class Zeros(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x): return x * 2\n    @staticmethod\n    def backward(ctx, gradient): return torch.zeros_like(gradient)\nw = torch.ones(8, device='cuda', requires_grad=True)\n(Zeros.apply(w) + w * w).sum().backward()\nw.grad.nonzero()"),
    (CAUGHT, "w = torch.ones(8, requires_grad=True)\nw.grad = torch.zeros(8)\n(w.cuda() * 2).sum().cpu().backward()\nw.grad.nonzero()"),
    (CAUGHT, "w = torch.ones(1000, 1000, requires_grad=True)\n(w * x.cpu()).sum().backward()\nw.grad.nonzero()"),
    # What C++ reads in backward, and writes without saying so.
    (CAUGHT, "w = x[:, 0].clone().requires_grad_()\nw.prod().backward()"),
    (CAUGHT, "w = x[:, 0].clone().requires_grad_()\nw.cumprod(0).sum().backward()"),
    (CAUGHT, "layer = torch.nn.BatchNorm1d(10).cuda()\nlayer(y.view(10, 10))\nlayer.running_mean.nonzero()"),
    (CAUGHT, "layer = torch.nn.InstanceNorm1d(8, track_running_stats=True).cuda()\nlayer(x[:64].view(8, 8, 1000))\nlayer.running_var.nonzero()"),
    (CAUGHT, "layer = torch.nn.BatchNorm1d(10).cuda()\nwith torch.inference_mode(): layer(y.view(10, 10))\nlayer.running_mean.nonzero()"),
    (CAUGHT, "layer = copy.deepcopy(expert)\ntrain = torch.optim.SGD(layer.parameters(), lr=.1)\nlayer(x).sum().backward()\ntrain.zero_grad(set_to_none=False)\ntorch.autograd.grad(layer(x).sum(), layer.weight)\n(layer.bias * 2).sum().backward(inputs=[layer.bias])\nlayer.bias.grad.nonzero()"),
    # What a CUDA graph writes to when it is replayed.
    (CAUGHT, "given, graph = torch.arange(8.).cuda(), torch.cuda.CUDAGraph()\nwith torch.cuda.graph(graph): made = given - 3\ngiven.zero_()\ngraph.replay()\nmade.nonzero()"),
    (CAUGHT, "total, graph = torch.zeros(8, dtype=torch.int64).cuda(), torch.cuda.CUDAGraph()\nwith torch.cuda.graph(graph): total.add_(known)\ntotal.zero_()\ngraph.replay()\ntotal.nonzero()"),
    # A published way to run a mixture of experts (DeepSeek's).
    (CAUGHT, "idx = expert(x)[:, :8].softmax(-1).topk(2)[1]\nc = idx.new_zeros((len(idx), 8))\nc.scatter_(1, idx, 1)\nst, out = 0, []\nfor i, n in enumerate(c.sum(0).cpu().numpy()):\n    if n:\n        out.append(expert(x[st:st + n]))\n        st += n"),
    (CAUGHT, "torch.isin(score.argsort(), known).sum().item()"),
    (CAUGHT, "np.save(file := io.BytesIO(), y.cpu().numpy())\nfile.seek(0)\ntorch.from_numpy(np.load(file)).cuda().argmax().item()"),
    (CAUGHT, "import safetensors.torch as s\ns.load(s.save({'y': y}))['y'].cuda().argmax().item()"),
    (CAUGHT, "torch.isin(known, score.argsort()[:4]).any().item()"),
    (CAUGHT, "part = torch.ones(8, dtype=torch.bool, device='cuda')\npart[:4] = torch.isin(score.argsort()[:4], known)\nif part.all(): expert(x)"),
    (CAUGHT, "if torch.isin(score.argsort(), known).any() | (score > 0).any(): expert(x)"),
    (CAUGHT, "x[:int('{}'.format(score.argmax()))]"),
    (CAUGHT, "text = f'{loss:.0f}'\nint(float(str(loss.item())))"),
    (CAUGHT, "lock = threading.Lock()\nlock.acquire()\nimport _thread\ndef read():\n    x.nonzero()\n    lock.release()\n_thread.start_new_thread(read, ())\nlock.acquire()"),
    (CAUGHT, "torch.utils.dlpack.to_dlpack(score.argsort().cpu())"),
    (CAUGHT, "total = 0\nfor one in score[:3]: total += float(one)\nrange(round(total / 3))"),
    (CAUGHT, "values = [float(one) for one in score[:3]]\nvalues.sort()"),
    (CAUGHT, "def value(): return 2 * float(loss)\nmath.floor(value())"),
    (CAUGHT, "torch.sparse_coo_tensor(score.argsort()[None], score)"),
    (CAUGHT, "torch.sparse_coo_tensor(values=score, indices=[score.argsort()])"),
    (CAUGHT, "torch.sparse_csr_tensor(known[:5], score[:4].argsort(), score[:4])"),
    (CAUGHT, "probabilities = x.view(50, 20, 1000)[:, :4, :20].log_softmax(-1).requires_grad_()\nF.ctc_loss(probabilities, known[:4, None] + 1, score[:4].argsort() + 9, known[:4] * 0 + 1)"),
    (CAUGHT, "probabilities = x.view(50, 20, 1000)[:, :4, :20].log_softmax(-1).requires_grad_()\nF.ctc_loss(probabilities, known[:4] + 1, known[:4].cpu() + 40, score[:4].argsort().cpu())"),
    # Memory that NumPy or another library sees as well.
    (CAUGHT, "buffer = np.zeros(1000, dtype=np.int64)\ntorch.from_numpy(buffer).copy_(x.argmax(-1))\nx[: buffer.max()]"),
    (CAUGHT, "buffer = np.zeros(1000, dtype=np.int64)\nkept = torch.as_tensor(buffer)\ntorch.as_tensor(buffer)\nkept.copy_(score.argsort())"),
    (CAUGHT, "torch.asarray(np.zeros(1000, dtype=bool)).copy_(score > 0)"),
    (CAUGHT, "torch.frombuffer(bytearray(8000), dtype=torch.int64).copy_(score.argsort())"),
    (CAUGHT, "host = torch.zeros(1000, dtype=torch.int64)\nview = host.numpy()[1:]\nhost.numpy()\nhost.copy_(score.argsort())"),
    (CAUGHT, "host = torch.zeros(1000, dtype=torch.int64, pin_memory=True)\nview = np.asarray(host)\nhost.copy_(score.argsort(), non_blocking=True)"),
    (CAUGHT, "host = torch.zeros(1000, dtype=torch.int64)\nview = np.from_dlpack(host)\nhost.copy_(score.argsort())"),
    # Branches on a float, or on tokens that end what is generated.
    (DECIDED, "losses = torch.zeros(4)\nfor i in range(4): losses[i] = x.sum().item()\nif losses.mean() < 5: expert(x)"),
    (DECIDED, "best = torch.tensor(loss.item())\nif not best > torch.tensor(3.0): expert(x)"),
    (CAUGHT, "int(torch.tensor(loss.item()) > 2)"),
    (CAUGHT, "losses = torch.zeros(4)\nlosses[0] = loss.item()\nlosses[1:2] = x[0, :1].cpu()\nif losses.mean() < 5: expert(x)"),
    (DECIDED, "with torch.inference_mode():\n    if torch.isin(score.argsort(), known).any() & known.any(): expert(x)"),
    (DECIDED, "while not torch.isin(score.argsort(), known).all(0).item(): break"),
    (DECIDED, "going = torch.ones(1000, dtype=torch.int64, device='cuda') & ~torch.isin(score.argsort(), known)\nassert not going.max() == 0"),
    (DECIDED, "if float(loss) > .1: expert(x)"),
    (DECIDED, "if 3 * loss.item() - 1 > .1: expert(x)"),
    (DECIDED, "y = 1 if abs(loss.cpu().item()) >= .1 else 2"),
    (DECIDED, "best = min(.5, loss.item())"),
    (DECIDED, "best = max(.5, float(loss))"),
    (DECIDED, "values = score[:8].tolist()\nvalues.index(max(values))"),
    (DECIDED, "while loss.item(): break"),
    (DECIDED, "if loss: expert(x)"),
    (DECIDED, "if torch.is_nonzero(loss.cpu()): expert(x)"),
    (DECIDED, "if torch.is_nonzero(input=loss): expert(x)"),
    (DECIDED, "with torch.inference_mode():\n    if torch.is_nonzero(x.sum()): expert(x)"),
    (DECIDED, "if float(loss.as_subclass(Sub)) > .1: expert(x)"),
    (DECIDED, "if loss.as_subclass(Sub): expert(x)"),
    (DECIDED, "if loss.item() in (.1, .2): expert(x)"),
    (DECIDED, "if np.exp(loss.item()) > 2: expert(x)"),
    (DECIDED, "w = torch.nn.Parameter(torch.ones(4, device='cuda'))\nplan = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([w], lr=.1))\nplan.step(loss.item())"),
    (DECIDED, "w = torch.nn.Parameter(torch.ones(4, device='cuda'))\nplan = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([w], lr=.1))\nplan.step(loss)"),
    (DECIDED, "w = torch.ones(8, device='cuda', requires_grad=True)\nw.register_hook(lambda g: g if g.sum().item() > 0 else -g)\n(w * 2).sum().backward()"),
    (DECIDED, "w = torch.ones(8, device='cuda', requires_grad=True)\n(Layer.apply(w) * 2).sum().backward()"),
    (DECIDED, "class Stopping:\n    best = float('inf')\n    def __call__(self, now):\n        if now < self.best - .1: self.best = now\nstop = Stopping()\nstop(loss.item())\nstop(loss.item())"),
    (DECIDED, "n = 1.\nfor _ in range(2):\n    if n < .1: expert(x)\n    n = .9 * n + float(loss)"),
    (DECIDED, "if float(f'{loss:.3f}') > .1: expert(x)"),
    (DECIDED, "def value(): return float(loss)\nif value() > .1: expert(x)"),
    # Floats that cannot be followed further, or need not.
    (READ, "loss.item()"),
    (READ, "accuracy = (x.argmax(-1) == 1).float().mean().item()"),
    (READ, "f'{loss:.2f} {score.argmax()}'"),
    (READ, "torch.utils.dlpack.to_dlpack(score.cpu())"),
    (READ, "n = round(float(loss), 3)\nprint(f'{n:.3f}')\nif math.isnan(n): expert(x)"),
    (READ, "metrics = {'loss': float(loss)}\nif len(metrics) > 1: expert(x)"),
    (READ, "complex(loss)"),
    (READ, "total = 0\ntotal += float(loss)"),
    (READ, "math.exp(loss.item())"),
    (READ, "if math.isnan(loss.item()) or not math.isfinite(float(loss)): expert(x)"),
    (READ, "if loss.item() == float('inf'): expert(x)"),
    (READ, "np.mean([loss.item(), loss.item()])"),
    (READ, "score.tolist()"),
    (READ, "x[:8, :8].numpy(force=True)"),
    (READ, "np.asarray(x[:8, :8].detach().cpu().float())"),
    (READ, "pickle.loads(pickle.dumps(loss.item()))"),
    (READ, "buffer = np.zeros(1000, dtype=np.float32)\ntorch.from_numpy(buffer).copy_(score)"),
    (READ, "host = torch.zeros(1000)\nview = host.numpy()\nhost.copy_(score)"),
    (READ, "import re\nint(re.search(r'[0-9]+', str(score.argmax()))[0])"),
    (READ, "repr({'best': score.argmax().cpu()})"),
    (READ, "torch.multiprocessing.SimpleQueue().put({'order': [score.argsort().cpu()]})"),
    # No value is read: sizes do not depend on any.
    (HARMLESS, "print(loss)  # text"),
    (HARMLESS, "print(score.argsort())  # text"),
    (HARMLESS, "str(loss), repr(score), f'{score}', f'{loss:.2f}'  # text"),
    (HARMLESS, "x.to('cpu', non_blocking=True).to('cuda')  # a copy alone"),
    (HARMLESS, "file = io.BytesIO()\ntorch.save((known, score.argsort(), torch.get_rng_state()), file)\nfile.seek(0)\nread = torch.load(file, map_location='cpu')\nassert read[0].tolist() == [*range(8)]\ntorch.set_rng_state(read[2])  # all known that is read"),
    (HARMLESS, "layer = torch.nn.Linear(1000, 1000, device='cuda')\ntrain = torch.optim.AdamW(layer.parameters(), fused=True)\nlayer(x).sum().backward()\ntrain.step()\nfile = io.BytesIO()\ntorch.save((layer.state_dict(), train.state_dict()), file)\nfile.seek(0)\nmodel, state = torch.load(file)\nlayer.load_state_dict(model)\ntrain.load_state_dict(state)\ntrain.step()\ntrain.zero_grad()  # copied, and counters of steps are known"),
    (HARMLESS, "data = torch.utils.data.TensorDataset(torch.arange(8))\nnext(iter(torch.utils.data.DataLoader(data, num_workers=1)))[0].tolist()  # known"),
    (HARMLESS, "host = torch.zeros(1000, dtype=torch.int64)\nhost.numpy().sum()\nhost.copy_(score.argsort())  # no array is left"),
    (HARMLESS, "buffer = np.zeros(8, dtype=np.int64)\ntorch.from_numpy(buffer).copy_(known)\nassert buffer.tolist() == [*range(8)]\nscore.argsort().cpu()  # known"),
    (HARMLESS, "data = [(np.arange(4), np.ones(4)) for _ in range(8)]\nfor at, one in torch.utils.data.DataLoader(data, 4, pin_memory=True): x[at.cuda()].argmax(-1).cpu() == at  # read from NumPy alone"),
    (HARMLESS, "rows = torch.eye(5, device='cuda').to_sparse_csr()\nassert rows.crow_indices().tolist() == [*range(6)] and rows.cpu().col_indices().tolist() == [*range(5)]\nrows.to(torch.float16)\ntorch.eye(5, device='cuda').to_sparse().cpu()  # all known"),
    (HARMLESS, "assert torch.eye(5).to_sparse_csr().crow_indices().tolist() == [*range(6)] and torch.eye(5).nonzero().stride() == torch.nonzero(torch.eye(5), out=torch.empty(0, dtype=torch.int64)).stride() == torch.eye(5).cuda().nonzero().stride()  # laid out as torch does"),
    (HARMLESS, "torch.sparse_coo_tensor(score.argsort()[None], score, (1000,)), torch.sparse_coo_tensor(score.argsort()[None], score, size=(1000,)), torch.sparse_coo_tensor((3, 4), device='cuda')\nassert torch.sparse_coo_tensor(known[None], score[:8]).shape == (8,) and torch.sparse_csr_tensor(known[:5], known[:4], score[:4]).shape == (4, 4)  # of a given size, or all known"),
    (HARMLESS, "queue = torch.multiprocessing.SimpleQueue()\nqueue.put([known.cpu()])\nassert queue.get()[0].tolist() == [*range(8)]  # known"),
    (HARMLESS, "probabilities = x.view(50, 20, 1000)[:, :4, :20].log_softmax(-1).requires_grad_()\nfor lengths in (known[:4] * 0 + 1, known[:4].cpu() * 0 + 1, [1] * 4):\n    F.ctc_loss(probabilities, known[:4, None] + 1, lengths, lengths).backward()\n    F.ctc_loss(probabilities, known[:4] + 1, lengths, lengths)\nwith torch.backends.cudnn.flags(enabled=False): F.ctc_loss(probabilities, known[:4].int() + 1, lengths, lengths, reduction='none')  # known lengths, on either side"),
    (HARMLESS, "for one in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__format__, torch.tensor, torch.from_numpy, torch.utils.dlpack.to_dlpack): assert pickle.loads(pickle.dumps(one)) is one  # a function, sent to another process"),
    (HARMLESS, "done = torch.isin(score.argsort(), known)\ndone |= torch.ones(1000, dtype=torch.bool, device='cuda')\nassert (torch.ones(1000, dtype=torch.int64, device='cuda') & ~done).max() == 0  # whatever the tokens are"),
    (HARMLESS, "assert not ((score > 0) & torch.zeros(1000, dtype=torch.bool, device='cuda')).any()  # whatever the values are"),
    (HARMLESS, "assert (score.argsort() * torch.zeros(1000, dtype=torch.int64, device='cuda')).eq(0).all()  # whatever the values are"),
    (HARMLESS, "x[score.argsort()]  # as many rows as indices"),
    (HARMLESS, "x.masked_fill(x > 0, 0)  # of x's shape"),
    (HARMLESS, "x[x > 0] = 0\nx[..., score > 0] = 1.5  # fills as masked_fill does"),
    (HARMLESS, "logits = x[:4]\nlogits[logits < logits.topk(8)[0][:, [-1]]] = -float('inf')  # likewise"),
    (HARMLESS, "host = x[:8, :8].cpu()\nhost[host > 0] = 0  # likewise"),
    (HARMLESS, "x.topk(8).indices.sort()  # of a given number"),
    (HARMLESS, "known.repeat_interleave(score[:8].argsort(), output_size=28)  # of a given size"),
    (HARMLESS, "torch.nn.utils.clip_grad_norm_([torch.nn.Parameter(y)], 1.0, error_if_nonfinite=True)  # taken as finite"),
    (READ, "if torch.isnan(loss) or torch.isinf(loss.cpu()): expert(x)  # taken as finite"),
    (CAUGHT, "l = torch.where(score < 1, -math.inf, score)\ntorch.zeros(torch.isfinite(l).sum().item(), device='cuda')"),
    (CAUGHT, "t = x.sqrt()\nt[~t.isnan()]"),
    (CAUGHT, "score[score == score]"),
    (CAUGHT, "d = torch.randn(1000, 100)\nd[::2] = math.nan\ntorch.nonzero(d.cuda().isnan().any(1))"),
    (CAUGHT, "int(torch.isneginf(score).logical_not().long().sum())"),
    (READ, "l = x.masked_fill(x < 0, -math.inf)\nif torch.isinf(l).any(): l = l @ l"),
    (READ, "layer = copy.deepcopy(expert)\nlayer(x).sum().backward()\ntorch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0, error_if_nonfinite=True)"),
    (DECIDED, "def f(w):\n    if w.sum().item() > 0: w = w @ w\n    return w.sum()\ntorch.func.grad(f)(x)"),
    (CAUGHT, "torch.func.vjp(lambda w: w * round(w.sum().item()), x)"),
    (READ, "torch.func.grad(lambda w: w.sum() * w[0].tolist()[0])(x)"),
    (READ, "@torch.jit.script\ndef scripted(w):\n    if float(w.sum()) > 0.5: w = w @ w\n    return w\nscripted(x)"),
    (READ, "@torch.jit.script\ndef listed(w):\n    n: list[float] = w.tolist()\n    return n\nlisted(score)"),
    (HARMLESS, "@torch.jit.script\ndef listed(w):\n    n: list[int] = w.tolist()\n    return n\nassert listed(known) == [*range(8)] == listed(known.cpu())  # known"),
    (READ, "score.cpu().apply_(abs)"),
    (READ, "host = score.argsort().cpu()\nctypes.c_long.from_address(host.data_ptr()).value"),
    (READ, "safetensors.torch.load(safetensors.torch.save({'order': score.argsort()}))['order'].tolist()"),
    (READ, "safetensors.torch.load(safetensors.torch.save({'half': x.half(), 'large': torch.randn(2000, 1000).cuda()}))"),
    (HARMLESS, "assert safetensors.torch.load(safetensors.torch.save({'known': known}))['known'].tolist() == [*range(8)]  # known"),
    (HARMLESS, "assert known.cpu().apply_(lambda one: one + 1).tolist() == torch.ones(8, dtype=torch.int64).map_(known.cpu(), lambda one, other: one + other).tolist()  # known"),
    (HARMLESS, "score.data_ptr(), score.untyped_storage().data_ptr(), known.cpu().data_ptr()  # of the GPU, and known"),
    (READ, "print(statistics.mean([loss.item(), loss.item()]), statistics.stdev([loss.item(), 2.0]))"),
    (HARMLESS, "d = torch.distributions.Categorical(logits=x)\nd.log_prob(d.sample())  # refused or not"),
    (HARMLESS, "torch.normal(x, x.exp())  # refused or not"),
    (HARMLESS, "F.gaussian_nll_loss(x, x, x.exp())  # refused or not"),
    (HARMLESS, "w = x.clone().requires_grad_()\nwith torch.autograd.set_detect_anomaly(True): w.square().sum().backward()  # finite"),
    (HARMLESS, "known.tolist(), known.cpu().numpy(), known.numpy(force=True), int(known.sum()), complex(known[1]), torch.is_nonzero(known[1]), sorted(known.cpu().tolist())  # all known"),
    (HARMLESS, "known[known > 3], known.cpu().nonzero(), known.unique()  # all known"),
    (HARMLESS, "part = known.as_subclass(Sub)\npart.tolist(), part.cpu().nonzero(), (part + 1).sum().item()  # all known"),
    (HARMLESS, "copy.deepcopy(known).tolist(), copy.deepcopy(known.cpu()).nonzero()  # all known"),
    (HARMLESS, "with torch.inference_mode(): known.cpu().tolist(), int(known.sum()), torch.where(known > 3)  # all known"),
    (HARMLESS, "torch.randperm(8, device='cuda').tolist(), torch.randint(9, (8,), device='cuda').tolist()  # drawn by the host"),
    (HARMLESS, "w = torch.ones(8, device='cuda', requires_grad=True)\nw.register_hook(lambda g: g * len(known[known > 3].cpu().nonzero()))\n(w * 2).sum().backward()  # all known, in backward too"),
    (HARMLESS, "w = torch.ones(8, 3, device='cuda', requires_grad=True)\nkept = w[known > 3]\nassert kept.shape == (4, 3)\nkept.sum().backward()  # a known mask, in backward too"),
    (HARMLESS, "w = x[:8].clone().requires_grad_()\n(w[known > 3] * w[known.cpu() > 3]).sum().backward()  # likewise"),
    (HARMLESS, "layer = torch.nn.BatchNorm1d(10).cuda().eval()\nlayer(y.view(10, 10))\nlayer.running_var.nonzero()  # does not train"),
    (HARMLESS, "layer = torch.nn.BatchNorm1d(2).cuda()\ngiven = torch.arange(8.0).view(4, 2)\nmade, theirs = layer(given.cuda()), torch.nn.BatchNorm1d(2)\nassert made.cpu().allclose(theirs(given)) and layer.running_var.cpu().allclose(theirs.running_var)  # all known"),
    (HARMLESS, "layer = copy.deepcopy(expert)\nlayer(x).sum().backward()\nlayer.zero_grad(set_to_none=False)\nassert not len(layer.bias.grad.nonzero())  # known to be zero"),
    (HARMLESS, "given, graph = torch.arange(8.).cuda(), torch.cuda.CUDAGraph()\nwith torch.cuda.graph(graph): made = given - 3\ngraph.replay()\ngiven.nonzero()  # not written to"),
    (HARMLESS, "w = torch.ones(8, requires_grad=True)\n(w * 2).sum().backward()\nw.grad.nonzero()  # of the host alone"),
    # The mixture of experts above, of experts that are known: its branches and its sizes are the true ones.
    (HARMLESS, "idx = torch.arange(1000).view(1000, 1).cuda() % 8\nc = idx.new_zeros((len(idx), 8))\nc.scatter_(1, idx, 1)\nst, out = 0, []\nfor i, n in enumerate(c.sum(0).cpu().numpy()):\n    if n:\n        out.append(expert(x[st:st + n]))\n        st += n\nassert [len(one) for one in out] == [125] * 8, [len(one) for one in out]  # all known"),
]  # fmt: skip


def test_no_value_that_is_not_computed_decides_anything_without_a_word(on_gpu, tmp_path):
    probes = "".join(f"def f{at}():\n{textwrap.indent(body, '    ')}\n" for at, (_, body) in enumerate(TABLE))
    (tmp_path / "probes.py").write_text(COMMON + probes, encoding="utf-8")
    source = f"""
import contextlib, io, sys; sys.path.insert(0, '.')
from pytest_gpumem.emulating.host_values.scope import current
import probes
for at in range({len(TABLE)}):
    reads = current().reads
    reads.take_trouble(), reads.take_others()
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            getattr(probes, f"f{{at}}")()
            raised = None
        except Exception as error:
            raised = f"{{type(error).__name__}}: {{error}}"
    print((reads.take_trouble(), reads.take_others().notes(), raised))
"""
    lines = on_gpu(source).splitlines()
    functions = [one for one in ast.parse(COMMON + probes).body if isinstance(one, ast.FunctionDef)]
    wrong = []
    for (expected, body), line, function in zip(TABLE, lines, functions, strict=True):
        trouble, notes, raised = ast.literal_eval(line)
        words = trouble or " ".join(notes)
        found = CAUGHT if trouble else DECIDED if "decided a branch" in words else READ if words else HARMLESS
        places = [f"probes.py:{at}" for at in range(function.lineno, function.end_lineno + 1)]
        in_layer = "Layer" in body
        if found != expected or (words and not in_layer and not any(place in words for place in places)):
            wrong.append(f"{body}\n    expected {expected}, found {found}: {words} ({raised})")
        elif expected == HARMLESS and raised:
            wrong.append(f"{body}\n    raised {raised}")
    assert not wrong, "\n".join(wrong)


def test_the_table_has_each_kind_and_sixty_probes():
    assert len(TABLE) >= 60
    assert {kind for kind, _ in TABLE} == {CAUGHT, DECIDED, READ, HARMLESS}
    assert all("#" in body for kind, body in TABLE if kind == HARMLESS)
