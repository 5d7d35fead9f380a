"""Plans of graphs, drawn from what their nodes and collectives are estimated to take."""
