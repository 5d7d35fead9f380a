"""What hosts of a training run need of autoshard; each module imports its host when it is used."""
