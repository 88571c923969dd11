"""How controllers, nodes and people prove their identity: secrets, tokens, certificates, enrolment."""
