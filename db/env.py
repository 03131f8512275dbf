"""Alembic's entry: runs the migrations on the connection, and in the transaction, that `evoattn.storage.engine` hands
over."""

from alembic import context

from evoattn.storage.schema import VERSION_TABLE, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
