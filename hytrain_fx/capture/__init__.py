"""The graphs of torch.compile come in.

Is given what Dynamo and AOTAutograd trace, and the model. Returns captured graphs, their data
flow, the units and the parameter table. Never changes a graph, and never decides.
"""
