"""Who is who: secrets, tokens, certificates, enrolment."""
