"""Access control of the controller: tokens, certificates, request rates, the audit log."""
