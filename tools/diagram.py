"""Draws the method with the names that the code uses.

python -m tools.diagram                     # writes docs/method.png
"""

from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

GREY, GOLD, RED = "#e8e8e8", "#ffe3b3", "#ffd0cc"  # plain actor-critic, GACE, GDAN
BOXES = {  # name: text, x, y, width, colour
    "image": ("image", 0, 2, 1.3, GREY),
    "instruction": ("instruction\n(goal)", 0, 0, 1.3, GREY),
    "encoder": ("feature_extractor\n$e_t$ (Eq. 1)", 2.1, 2, 1.9, GREY),
    "storage": ("GoalStorage\nstates of success,\nlabelled by their goal", 0, 4, 1.9, GOLD),
    "discriminator": ("goal_discriminator\n(Eq. 7)", 4.8, 4, 2, GOLD),
    "loss": ("gace_loss\n(Eq. 8)", 8, 4, 1.4, GOLD),
    "gate": ("gated attention\n$M$", 4.8, 1, 1.7, GREY),
    "memory": ("LSTM or linear\n$e^1$", 7.5, 0, 1.7, GREY),
    "attention": ("attention $u$, $h$\n(Eq. 10, 11)", 7.5, 2, 1.7, RED),
    "heads": ("policy\nand value", 10.1, 1, 1.3, GREY),
}
ARROWS = [  # from, to, label, colour, shift upwards
    ("image", "encoder", "", "black", 0),
    ("storage", "encoder", "goal states", "darkorange", 0),
    ("encoder", "discriminator", "", "darkorange", 0.2),
    ("encoder", "discriminator", "current state", "firebrick", -0.2),
    ("discriminator", "loss", "", "darkorange", 0),
    ("encoder", "gate", "", "black", 0),
    ("instruction", "gate", "", "black", 0),
    ("gate", "memory", "", "black", 0),
    ("discriminator", "attention", "query: the hidden layer\nfor the current state", "firebrick", 0),
    ("memory", "attention", "\n\nkey, value", "firebrick", 0),
    ("attention", "heads", "", "firebrick", 0),
    ("gate", "heads", "", "black", 0),
    ("memory", "heads", "", "black", 0),
]
HEIGHT = 1.0


def edge(start, end):
    """The points at which an arrow leaves one box and enters another."""
    (_, x1, y1, w1, _), (_, x2, y2, w2, _) = BOXES[start], BOXES[end]
    if x2 >= x1 + w1:
        return (x1 + w1, y1 + HEIGHT / 2), (x2, y2 + HEIGHT / 2)
    down = y2 < y1
    return (x1 + w1 / 2, y1 if down else y1 + HEIGHT), (x2 + w2 / 2, y2 + HEIGHT if down else y2)


def main():
    figure, axes = plt.subplots(figsize=(11, 4.9), layout="constrained")
    for text, x, y, width, colour in BOXES.values():
        axes.add_patch(plt.Rectangle((x, y), width, HEIGHT, facecolor=colour, edgecolor="black", linewidth=0.8))
        axes.text(x + width / 2, y + HEIGHT / 2, text, ha="center", va="center", fontsize=9.5)
    for start, end, label, colour, shift in ARROWS:
        tail, head = ((x, y + shift) for x, y in edge(start, end))
        axes.annotate("", head, tail, arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 1.4})
        middle = (tail[0] + head[0]) / 2, (tail[1] + head[1]) / 2
        axes.text(middle[0] + 0.1, middle[1], label, color=colour, fontsize=9, ha="left", va="center")
    for y, (text, colour) in enumerate({"GDAN": RED, "GACE": GOLD, "actor-critic": GREY}.items()):
        axes.add_patch(
            plt.Rectangle((10.1, 3.6 + 0.45 * y), 0.3, 0.3, facecolor=colour, edgecolor="black", linewidth=0.8)
        )
        axes.text(10.5, 3.75 + 0.45 * y, text, va="center", fontsize=9)
    axes.set(xlim=(-0.1, 11.5), ylim=(-0.1, 5.1))
    axes.axis("off")
    path = Path("docs", "method.png")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
