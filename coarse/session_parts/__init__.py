"""The parts of a Session: how it starts, who belongs to it, its plan, its checks, its client."""
