"""The parts of studies/paper.py: the paper's claims in small, from whole runs of the small recipes."""
