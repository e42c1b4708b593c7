import type { ComponentChildren, JSX } from "preact";

interface Props {
  id: string;
  title: string;
  /** What it shows, to one who has never seen it. */
  explain: ComponentChildren;
  aside?: ComponentChildren;
  children: ComponentChildren;
}

export function Panel({ id, title, explain, aside, children }: Props): JSX.Element {
  return (
    <section class={`panel ${id}`} aria-labelledby={`${id}-title`}>
      <header>
        <h2 id={`${id}-title`}>{title}</h2>
        {aside && <div class="aside">{aside}</div>}
      </header>
      <p class="explain">{explain}</p>
      {children}
    </section>
  );
}
