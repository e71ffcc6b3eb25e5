"""From times to a plan: the equation, windows, the planner, the simulator.

Is given a profile and what binds. Returns plans and predictions. Never measures, and knows no
torch.
"""

# The link `cost_model` at the top of the repository leads here; through it every module would load
# a second time.
if __name__ != "hytrain_fx.cost_model":
    raise ImportError(
        f"imported as {__name__!r} through a link to hytrain_fx/cost_model; expected `import hytrain_fx.cost_model`", name=__name__
    )
