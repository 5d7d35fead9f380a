"""From a model to a sharded one: units are found, parameters cut, modules given methods."""
