"""Who may connect, ask and order: tokens, certificates, rates, the audit log."""
