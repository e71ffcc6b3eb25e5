"""Train an MLP with the plain loop and with hytrain_fx, and compare loss and accuracy.

It learns scikit-learn's bundled digit images.

    python examples/train_mlp.py

The data is 1797 real scans of hand-written digits (8 x 8 pixels) that scikit-learn brings along, so
nothing is downloaded.
"""

from __future__ import annotations

import argparse
import itertools

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm

import hytrain_fx

TEST_IMAGES = 357
BATCH = 96


def digits(device: str) -> tuple[Tensor, Tensor]:
    """Images (1797, 64) float32 in 0..1 and labels (1797,) int64.

    They are shuffled the same way on every call.
    """
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(1))
    images = torch.tensor(data.data, dtype=torch.float32)[order] / 16
    return images.to(device), torch.tensor(data.target, dtype=torch.int64)[order].to(device)


def new_model(width: int, hidden_layers: int, device: str) -> nn.Module:
    """The same MLP with the same weights on every call."""
    torch.manual_seed(0)
    sizes = [64, *[width] * hidden_layers]
    layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*layers, nn.Linear(width, 10)).to(device)


def train(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor, epochs: int) -> list[float]:
    """The user's loop, the same for both runs. Returns the mean loss of each epoch."""
    losses = []
    for _ in tqdm(range(epochs), desc=f"{name:10}", unit="epoch"):
        total = torch.zeros((), device=images.device)
        whole = len(images) // BATCH * BATCH  # one shape, one compilation
        for x, y in zip(images[:whole].split(BATCH), labels[:whole].split(BATCH), strict=True):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        losses.append(total.item() * BATCH / whole)
    return losses


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of the images whose digit is found."""
    return float((model(images).argmax(-1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--hidden-layers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    images, labels = digits(args.device)
    training = (images[TEST_IMAGES:], labels[TEST_IMAGES:])
    testing = (images[:TEST_IMAGES], labels[:TEST_IMAGES])

    plain_model = new_model(args.width, args.hidden_layers, args.device)
    plain_model.compile()
    plain = train("plain", plain_model, torch.optim.AdamW(plain_model.parameters(), lr=args.lr), *training, args.epochs)

    model = new_model(args.width, args.hidden_layers, args.device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer = hytrain_fx.compile(model, optimizer)
    ours = train("hytrain_fx", model, optimizer, *training, args.epochs)

    print("\nepoch  plain loss  hytrain_fx")
    for epoch in sorted({*range(0, args.epochs, max(1, args.epochs // 10)), args.epochs - 1}):
        print(f"{epoch:5}  {plain[epoch]:10.6f}  {ours[epoch]:10.6f}")
    for name, trained in (("plain", plain_model), ("hytrain_fx", model)):
        print(f"{name}: {accuracy(trained, *testing):.2%} of {TEST_IMAGES} other images recognised")
    print()
    print(hytrain_fx.explain(model))
    hytrain_fx.close(model)


if __name__ == "__main__":
    main()
