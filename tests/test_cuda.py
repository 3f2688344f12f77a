"""What is otherwise on a GPU, without one: fits, checkpoints and predictions on fake tensors of device "cuda"; which
device a fit takes; recurrent layers; processes that read mini-batches.

An operation on tensors of two devices is an error there, as on a GPU. Numbers are none: where one is asked for,
``Values`` says it. What cannot run so: backward passes (torch's engine asks CUDA's driver for a stream), cuDNN,
autocast on CUDA, and samplers, which decide by numbers all the time.
"""

import os
from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import Mock, patch

import pytest
import torch
from own_networks import NETS, made
from test_own_network import rows
from test_own_network_fits import META, WORDS, Words, Y
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import bnn_pyro as bp
from bnn_pyro.inference.cost import multiplications
from bnn_pyro.inference.mini_batches import Augmentation, MiniBatches
from bnn_pyro.inference.training_loop import Training
from bnn_pyro.parts.own_module import call_with_draws, own_copy

CUDA = torch.device("cuda", 0)
ops = torch.ops.aten


class Values(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is ops._local_scalar_dense.default:
            return args[0].dtype == torch.bool or (0.5 if args[0].is_floating_point() else 1)
        return func in (ops.equal.default, ops.allclose.default) or func(*args, **(kwargs or {}))


@contextmanager
def fake_gpu():
    """Tensors are fake from the moment on when a module is moved to the GPU."""
    advance, own_to, modes = Training.advance, nn.Module.to, ExitStack()

    def to(module, device):
        """Torch's own swaps tensors, which fake ones of real ones do not allow."""
        if device != CUDA:
            return own_to(module, device)
        if not torch._C._len_torch_dispatch_stack():
            modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            modes.enter_context(Values())
        moved = {}
        for part in module.modules():
            for store, kind in ((part._parameters, nn.Parameter), (part._buffers, lambda value, _: value)):
                for key, value in store.items():
                    if value is not None and id(value) not in moved:
                        moved[id(value)] = kind(value.detach().to(device), value.requires_grad)
                    store[key] = None if value is None else moved[id(value)]
        return module

    def without_gradients(training, x, y):
        def backward(_):
            for p in training.guide.parameters():
                p.grad = torch.zeros_like(p)

        with patch("torch.Tensor.backward", backward):
            advance(training, x, y)
        if training.step == 5:  # by way of a checkpoint, which is read to the CPU
            state = tree_map_only(Tensor, lambda t: t.cpu() if t.is_cuda else t, training.state_dict())
            training.load_state_dict(state)

    with (
        patch.object(nn.Module, "to", to),
        patch.object(Training, "advance", without_gradients),
        patch("torch.autograd.grad", lambda f, w, **_: tuple(map(torch.zeros_like, w))),
        patch("bnn_pyro.parts.own_start._without_gradient", lambda *_: []),
        patch("torch.inference_mode", lambda _: nullcontext()),  # whose end would end modes entered within
        patch("bnn_pyro.fitting.choose_device", lambda _: CUDA),
        patch("bnn_pyro.fitting.row_digests", lambda *_: torch.zeros(0)),
        torch.backends.cudnn.flags(enabled=False),
        modes,
    ):
        yield


def test_a_module_of_the_gpu_is_taken_to_where_models_are_made():
    net, moved = made("batch norm"), []
    with patch.object(nn.Module, "cpu", lambda module: moved.append(module) or module):
        assert own_copy(net) is moved[0] is not net


def test_recurrent_layers_do_without_cudnn_where_it_has_no_gradient():
    """Of "cudnn RNN backward can only be called in training mode", RuntimeError."""
    lstm, conv, seen = made("lstm"), made("conv2d"), []
    for net, training in ((lstm, False), (lstm, True), (conv, False)):
        net.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cudnn.enabled))
        call_with_draws(net.train(training), dict(net.named_parameters()), torch.zeros(2, 4, 6), False)
    with torch.no_grad():
        call_with_draws(lstm.eval(), dict(lstm.named_parameters()), torch.zeros(2, 4, 6), False)
    assert seen[-1] and seen[0] is False and seen.count(False) == 1
    # They use their weights at every time.
    assert multiplications(nn.LSTM(6, 5, batch_first=True), torch.zeros(1, 7, 6)) == 7 * 4 * 5 * (6 + 5)


def test_processes_that_read_mini_batches_use_no_cuda():
    def states(main=os.getpid()):
        assert os.getpid() == main, "Cannot re-initialize CUDA in forked subprocess"
        return []

    batches, chosen, moved = MiniBatches(rows(), 0, Augmentation(lambda x: x)), torch.arange(5), []
    with (
        patch("torch.cuda.is_available", lambda: True),
        patch("torch.cuda.get_rng_state_all", states),
        patch.object(Tensor, "cpu", lambda t: moved.append(t) or t),
    ):
        assert len(list(batches.load(iter([(0, chosen)]), workers=1))) == 1
    assert moved[0] is chosen  # no process can take a tensor of the GPU


@pytest.mark.parametrize(
    ("hidden", "method", "gpu"),
    [((50,), bp.SVI(), True), ((50,), bp.NUTS(), False), ((100, 100), bp.MILE(), False), ((999,), bp.ChEES(), True)],
)
def test_a_gpu_is_taken_but_for_samplers_whose_gradients_a_cpu_has_compiled(hidden, method, gpu, monkeypatch):
    data, begun = bp.dataset(torch.rand(1500, 16), torch.arange(1500) % 3), type("Begun", (Exception,), {})
    monkeypatch.setattr("bnn_pyro.fitting.choose_device", lambda name: CUDA)
    monkeypatch.setattr(nn.Module, "to", Mock(side_effect=begun))
    for device, expected in (("auto", gpu), ("cuda", True)):
        with pytest.raises(begun):
            bp.fit(bp.MeanField(hidden=hidden), data, method, progress=False, device=device)
        assert nn.Module.to.call_args.args[-1].type == ("cuda" if expected else "cpu")


pytestmark = pytest.mark.usefixtures("seeded")
SVI = bp.SVI(epochs=2, batch_size=10, patience=2)
NORMED = dict(start="pretrained", prior="pretrained:0.1", frozen="1.*", where="0|4.*", inputs="raw", init_scale=0.1)
CASES = {
    **{name: (lambda name=name: made(name), rows, {}, SVI) for name in NETS},
    "point": (lambda: made("conv1d"), rows, {}, bp.MAP(epochs=2, batch_size=10, accumulate=2, patience=2)),
    "low rank": (lambda: made("linear"), rows, dict(family="low-rank:2"), SVI),
    "buffers": (lambda: made("batch norm"), rows, NORMED, SVI),
    "dict": (Words, lambda: bp.dataset({"words": WORDS, "meta": META}, Y, task="regression"), {}, SVI),
}


@pytest.mark.filterwarnings("ignore:.*(one draw after the other|look like probabilities|taken as standardised)")
@pytest.mark.parametrize("name", CASES)
def test_all_of_a_fit_is_on_the_gpu(name):
    net, data, settings, method = CASES[name]
    net, data = net(), data()
    with fake_gpu():
        posterior = bp.fit(bp.Bayesian(net, **settings), data, method, progress=False, device="cuda")
        tensors = [*posterior.model.buffers(), *(posterior.chains or posterior.guide.state_dict()).values()]
        assert all(value.device == CUDA for value in tensors)
        prediction = bp.predict(posterior, data.x_test, num_draws=3)
        assert len(prediction.mean) == len(data.x_test) and prediction.mean.device.type == "cpu"
        posterior.describe()
